"""Check of the installed SGLang version against the range in the plugin's pyproject.toml."""

from __future__ import annotations

import sys
from importlib import metadata

from packaging.requirements import Requirement

from rlcore.errors import UserError


class SGLangMissing(UserError, ImportError):
    """SGLang is missing or has an unsupported version."""


def check_installed(needs_kernels: bool = False) -> str:
    """Return the version of the installed SGLang.

    Args:
        needs_kernels: True if SGLang will compute on a GPU, which requires its kernel package.

    Raises:
        SGLangMissing: SGLang or its kernel package is not installed, or this plugin does not support the version.
    """
    wanted = wanted_version()
    lines = (
        f'Type  {sys.executable} -m pip install "{wanted}"\n'
        "or use a separate virtual environment for SGLang:  rollout.python=OTHER_ENVIRONMENT/bin/python"
    )
    version = _version("sglang")
    if not version:
        raise SGLangMissing(f"rollout=sglang needs SGLang, which is not installed in {sys.prefix}\n{lines}")
    if not wanted.specifier.contains(version, prereleases=True):
        raise SGLangMissing(f"rollout=sglang requires {wanted}, but sglang {version} is installed\n{lines}")
    if needs_kernels and not _version("sglang-kernel"):
        raise SGLangMissing(
            f"SGLang {version} needs sglang-kernel on a GPU, which is not installed in {sys.prefix}\n"
            f'Type  {sys.executable} -m pip install "{wanted}"   without  --no-deps'
        )
    return version


def wanted_version() -> Requirement:
    """Return the supported range of versions as a requirement."""
    requirements = [Requirement(line) for line in metadata.requires("rlcore-sglang") or []]
    wanted = next(requirement for requirement in requirements if requirement.name == "sglang")
    return Requirement(f"sglang{wanted.specifier}")


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
