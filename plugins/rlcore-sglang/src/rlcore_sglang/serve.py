"""`python -m rlcore_sglang.serve MODEL --port 30000`: start an SGLang server that rlcore can use and send weights to.

The options are settings of `rollout=sglang`, spelled with dashes. Arguments after `--` go to SGLang unchanged.
Then:  rlcore train rollout=sglang rollout.url=http://localhost:30000 placement=split pools.rollout.device=cpu …
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlcore.errors import ConfigError
from rlcore.kits.engine.checks import read_limits
from rlcore.kits.engine.serve import ServerOptions, flags, serve
from rlcore_sglang.config import NO_FLOAT32, SGLangConfig
from rlcore_sglang.install import check_installed
from rlcore_sglang.own import engine_environment, engine_options

_NOT_SERVED = ("enable_memory_saver", "enable_weights_cpu_backup")
"""Engine options that a server does not need, because it never frees its device."""
_HEALTH = "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"
"""Environment variable that makes /health generate a token. A router would then consider a paused server dead."""


def main(argv: Sequence[str] | None = None) -> None:
    """Replace this process with the server."""
    serve(argv, SGLangConfig, _command, __doc__)


def _command(asked: ServerOptions[SGLangConfig]) -> tuple[list[str], Mapping[str, str]]:
    config, device = asked.config, asked.context.device
    check_installed(needs_kernels=device != "cpu")
    _check_precision(asked.model.precision, asked.rest, device)
    options = engine_options(config, asked.model, asked.context, read_limits(asked.model.path, config.max_model_len))
    options |= {"host": asked.host, "port": asked.port, "log_level": "warning", "skip_server_warmup": True}
    kept = {name: value for name, value in options.items() if name not in _NOT_SERVED}
    variables = {_HEALTH: "false"} | engine_environment(config, asked.context, [])
    return ["-m", "sglang.launch_server", *flags(kept, negate=False)], variables


def _check_precision(precision: str, rest: Sequence[str], device: str) -> None:
    if device != "cpu" and precision == "float32" and not any("attention-backend" in flag for flag in rest):
        raise ConfigError(
            f"--precision float32: {NO_FLOAT32}\n"
            "Type  --precision bfloat16  as in the run, or, slower,  -- --attention-backend triton"
        )


if __name__ == "__main__":
    main()
