"""Check of the installed SGLang version."""

from __future__ import annotations

import sys

from packaging.requirements import Requirement

from rlcore.kits.engine import install
from rlcore.kits.engine.install import EngineMissing


def check_installed(needs_kernels: bool = False) -> str:
    """Return the version of the installed SGLang.

    Args:
        needs_kernels: True if SGLang will compute on a GPU, which requires its kernel package.

    Raises:
        EngineMissing: SGLang or its kernel package is not installed, or this plugin does not support the version.
    """
    wanted = wanted_version()
    command = f'Type  {sys.executable} -m pip install "{wanted}"'
    elsewhere = "or use a separate virtual environment for SGLang:  rollout.python=OTHER_ENVIRONMENT/bin/python"
    version = install.check_version("sglang", "SGLang", wanted, ["sglang"], f"{command}\n{elsewhere}")
    if needs_kernels and not install.installed_version("sglang-kernel"):
        raise EngineMissing(
            f"SGLang {version} needs sglang-kernel on a GPU, which is not installed in {sys.prefix}\n"
            f"{command}   without  --no-deps"
        )
    return version


def wanted_version() -> Requirement:
    """Return the supported range of versions as a requirement."""
    return install.wanted_version("rlcore-sglang", "sglang")
