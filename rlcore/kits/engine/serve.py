"""Command line of `python -m PLUGIN.serve MODEL`, which starts a server that rlcore can use and send weights to.

Its options are settings of the rollout, spelled with dashes. Arguments after `--` go to the server unchanged.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, NoReturn, TypeVar

from rlcore.errors import RlcoreError
from rlcore.kits.engine.config import EngineConfig
from rlcore.models.load import check_directory
from rlcore.protocols.backend import ModelConfig
from rlcore.protocols.rollout import RolloutContext

C = TypeVar("C", bound=EngineConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions(Generic[C]):
    """The command line of a server."""

    config: C
    model: ModelConfig
    context: RolloutContext
    """With the device of this machine."""
    host: str
    port: int
    rest: Sequence[str]
    """Arguments for the server itself."""


def serve(
    argv: Sequence[str] | None,
    config: type[C],
    command: Callable[[ServerOptions[C]], tuple[list[str], Mapping[str, str]]],
    description: str | None,
) -> NoReturn:
    """Replace this process with a server.

    Args:
        argv: the command line; None for that of this process.
        command: returns the arguments of `python` before those of `--`, and all environment variables. Its errors are
            reported without a traceback.
        description: text of `--help`.
    """
    arguments, rest = _parser(config, description).parse_known_args(argv)
    try:
        check_directory(arguments.model, "MODEL")
        options = ServerOptions(
            config=config(**{name: getattr(arguments, name) for name in (*config.OF_SERVER, *config.OF_BOTH)}),
            model=ModelConfig(path=arguments.model, precision=arguments.precision),
            context=RolloutContext(device=_device()),
            host=arguments.host,
            port=arguments.port,
            rest=[item for item in rest if item != "--"],
        )
        words, variables = command(options)
    except RlcoreError as error:
        raise SystemExit(f"{config.SERVE}: {error}") from None
    os.execve(sys.executable, [sys.executable, *words, *options.rest], variables)


def flags(options: Mapping[str, Any], *, negate: bool) -> list[str]:
    """Return command-line flags for these arguments of an engine; None is left out.

    Args:
        negate: write False as `--no-NAME`; otherwise it is left out.
    """
    found = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            found += [f"--{flag}"] if value else [f"--no-{flag}"] * negate
        elif isinstance(value, list):
            found += [f"--{flag}", *map(str, value)]
        elif value is not None:
            found += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return found


def _parser(config: type[EngineConfig], description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {config.SERVE}", description=description, allow_abbrev=False)
    parser.add_argument("model", metavar="MODEL", help="model directory in Hugging Face layout; the run's model.path")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=config.PORT)
    parser.add_argument(
        "--precision", choices=["float32", "bfloat16"], default="float32", help="the run's model.precision"
    )
    for field in fields(config):
        if field.name in (*config.OF_SERVER, *config.OF_BOTH):
            kind = _truth if isinstance(field.default, bool) else type(field.default)
            parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    return parser


def _truth(text: str) -> bool:
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}")
    return text == "true"


def _device() -> str:
    import torch

    return "cuda:0" if torch.cuda.is_available() else "cpu"
