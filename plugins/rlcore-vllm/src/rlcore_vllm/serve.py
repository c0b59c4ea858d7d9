"""`python -m rlcore_vllm.serve MODEL --port 8000`: start a vLLM server that rlcore can generate with and send weights to.

The options are settings of `rollout=vllm`, spelled with dashes. Arguments after `--` go to vLLM unchanged.
Then:  rlcore train rollout=vllm rollout.url=http://localhost:8000 placement=split pools.rollout.device=cpu …
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from rlcore.kits.engine.serve import ServerOptions, flags, serve
from rlcore_vllm import host
from rlcore_vllm.config import VLLMConfig
from rlcore_vllm.inprocess import engine_options
from rlcore_vllm.install import check_installed


def main(argv: Sequence[str] | None = None) -> None:
    """Replace this process with the server."""
    serve(argv, VLLMConfig, _command, __doc__)


def _command(asked: ServerOptions[VLLMConfig]) -> tuple[list[str], Mapping[str, str]]:
    check_installed()
    host.set_environment(asked.context.device)
    options = engine_options(asked.config, asked.model, asked.context) | {
        "host": asked.host,
        "port": asked.port,
        "enable_scale_out": True,
        "disable_uvicorn_access_log": True,
    }
    words = ["-m", "vllm.entrypoints.openai.api_server", *flags(options, negate=True)]
    return words, os.environ | {"VLLM_SERVER_DEV_MODE": "1"}  # enables the endpoints for weights


if __name__ == "__main__":
    main()
