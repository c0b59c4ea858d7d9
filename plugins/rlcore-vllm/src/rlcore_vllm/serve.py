"""`python -m rlcore_vllm.serve MODEL --port 8000`: start a vLLM server that rlcore can generate with and send weights to.

The options are the settings of `rollout=vllm`, spelled with dashes. Arguments after `--` go to vLLM unchanged.
Then:  rlcore train rollout=vllm rollout.url=http://localhost:8000 placement=split pools.rollout.device=cpu …
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from rlcore.errors import RlcoreError
from rlcore.models.load import check_directory
from rlcore.protocols.backend import ModelConfig
from rlcore.protocols.rollout import RolloutContext
from rlcore_vllm import host
from rlcore_vllm.config import VLLMConfig
from rlcore_vllm.inprocess import engine_options
from rlcore_vllm.install import check_installed

_CLIENT_ONLY = (
    "url",
    "pause",
    "weights",
    "weights_directory",
    "bucket_mb",
    "timeout_s",
    "api_key_variable",
    "engine_options",
)
_MODULE = "vllm.entrypoints.openai.api_server"


def main(argv: Sequence[str] | None = None) -> None:
    """Replace this process with the server."""
    arguments, rest = _parser().parse_known_args(argv)
    try:
        check_installed()
        check_directory(arguments.model, "MODEL")
        host.set_environment(_device())
        command = [sys.executable, "-m", _MODULE, *flags(arguments), *[item for item in rest if item != "--"]]
    except RlcoreError as error:
        raise SystemExit(f"rlcore_vllm.serve: {error}") from None
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # enables the endpoints for weights
    os.execv(sys.executable, command)


def flags(arguments: argparse.Namespace) -> list[str]:
    """Return the command-line flags of vLLM's server."""
    chosen = {
        field.name: getattr(arguments, field.name) for field in fields(VLLMConfig) if field.name not in _CLIENT_ONLY
    }
    model = ModelConfig(path=arguments.model, precision=arguments.precision)
    options = engine_options(VLLMConfig(**chosen), model, RolloutContext(device=_device()))
    options |= {"host": arguments.host, "port": arguments.port, "enable_scale_out": True}
    options["disable_uvicorn_access_log"] = True
    return [item for name, value in options.items() for item in _flag(name.replace("_", "-"), value)]


def _flag(name: str, value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rlcore_vllm.serve", description=__doc__, allow_abbrev=False)
    parser.add_argument("model", metavar="MODEL", help="model directory in Hugging Face layout; the run's model.path")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--precision", choices=["float32", "bfloat16"], default="float32", help="the run's model.precision"
    )
    for field in fields(VLLMConfig):
        if field.name not in _CLIENT_ONLY:
            kind: Any = {"int": int, "float": float, "bool": _truth}[str(field.type)]
            parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    return parser


def _truth(text: str) -> bool:
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}")
    return text == "true"


def _device() -> str:
    import torch

    return "cuda:0" if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    main()
