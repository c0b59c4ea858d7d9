"""`python -m rlcore_sglang.serve MODEL --port 30000`: start an SGLang server that rlcore can use and send weights to.

The options are settings of `rollout=sglang`, spelled with dashes. Arguments after `--` go to SGLang unchanged.
Then:  rlcore train rollout=sglang rollout.url=http://localhost:30000 placement=split pools.rollout.device=cpu …
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from rlcore.errors import ConfigError, RlcoreError
from rlcore.kits.engine.checks import read_limits
from rlcore.models.load import check_directory
from rlcore.protocols.backend import ModelConfig
from rlcore.protocols.rollout import RolloutContext
from rlcore_sglang.config import NO_FLOAT32, SGLangConfig
from rlcore_sglang.install import check_installed
from rlcore_sglang.own import engine_environment, engine_options

_OPTIONS: dict[str, Any] = {
    "tensor_parallel": int,
    "max_batch_size": int,
    "max_model_len": int,
    "kv_cache_gb": float,
    "gpu_memory_utilization": float,
    "prefix_caching": bool,
    "deterministic": bool,
    "enforce_eager": bool,
}
"""Settings of SGLangConfig that apply to a server."""
_NOT_SERVED = ("enable_memory_saver", "enable_weights_cpu_backup")
"""Engine options that a server does not need, because it never frees its device."""
_HEALTH = "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"
"""Environment variable that makes /health generate a token. A router would then consider a paused server dead."""


def main(argv: Sequence[str] | None = None) -> None:
    """Replace this process with the server."""
    arguments, rest = _parser().parse_known_args(argv)
    context = RolloutContext(device=_device())
    try:
        check_installed(needs_kernels=context.device != "cpu")
        check_directory(arguments.model, "MODEL")
        _check_precision(arguments.precision, rest, context.device)
        config = SGLangConfig(**{name: getattr(arguments, name) for name in _OPTIONS})
        flags = server_flags(config, arguments, context)
    except RlcoreError as error:
        raise SystemExit(f"rlcore_sglang.serve: {error}") from None
    variables = {_HEALTH: "false"} | engine_environment(config, context, [])
    command = [sys.executable, "-m", "sglang.launch_server", *flags, *[item for item in rest if item != "--"]]
    os.execve(sys.executable, command, variables)


def _check_precision(precision: str, rest: Sequence[str], device: str) -> None:
    if device != "cpu" and precision == "float32" and not any("attention-backend" in flag for flag in rest):
        raise ConfigError(
            f"--precision float32: {NO_FLOAT32}\n"
            "Type  --precision bfloat16  as in the run, or, slower,  -- --attention-backend triton"
        )


def server_flags(config: SGLangConfig, arguments: argparse.Namespace, context: RolloutContext) -> list[str]:
    """Return the command-line flags of SGLang's server."""
    model = ModelConfig(path=arguments.model, precision=arguments.precision)
    options = engine_options(config, model, context, read_limits(arguments.model, config.max_model_len))
    options |= {"host": arguments.host, "port": arguments.port, "log_level": "warning", "skip_server_warmup": True}
    kept = {name: value for name, value in options.items() if name not in _NOT_SERVED}
    return [item for name, value in kept.items() for item in _flag(f"--{name.replace('_', '-')}", value)]


def _flag(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [name] if value else []
    if isinstance(value, list):
        return [name, *map(str, value)]
    return [name, str(value)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rlcore_sglang.serve", description=__doc__, allow_abbrev=False)
    parser.add_argument("model", metavar="MODEL", help="model directory in Hugging Face layout; the run's model.path")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument(
        "--precision", choices=["float32", "bfloat16"], default="float32", help="the run's model.precision"
    )
    defaults = SGLangConfig()
    for name, kind in _OPTIONS.items():
        reader = _truth if kind is bool else kind
        parser.add_argument(f"--{name.replace('_', '-')}", type=reader, default=getattr(defaults, name))
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
