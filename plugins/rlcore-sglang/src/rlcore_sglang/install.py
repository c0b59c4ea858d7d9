"""Is an SGLang installed that this plugin is written for? The range stands in the plugin's pyproject.toml alone."""

from __future__ import annotations

import sys
from importlib import metadata

from packaging.requirements import Requirement

from rlcore.errors import UserError


class SGLangMissing(UserError, ImportError):
    """SGLang is not installed, or another version of it."""


def check_installed(needs_kernels: bool = False) -> str:
    """The version of SGLang in this environment.

    Args:
        needs_kernels: whether SGLang will compute on a GPU, for which it has a package of kernels.

    Raises:
        SGLangMissing: there is none, or one that this plugin is not written for.
    """
    wanted = wanted_version()
    lines = (
        f'Type  {sys.executable} -m pip install "{wanted}"\n'
        "If this environment has another engine, give SGLang its own:  rollout.python=OTHER_ENVIRONMENT/bin/python"
    )
    version = _version("sglang")
    if not version:
        raise SGLangMissing(f"rollout=sglang needs SGLang, which is not installed in {sys.prefix}\n{lines}")
    if not wanted.specifier.contains(version, prereleases=True):
        raise SGLangMissing(f"rollout=sglang is written for {wanted}, and sglang {version} is installed\n{lines}")
    if needs_kernels and not _version("sglang-kernel"):
        raise SGLangMissing(
            f"SGLang {version} needs its package of kernels on a GPU, and sglang-kernel is not installed in {sys.prefix}\n"
            f'Type  {sys.executable} -m pip install "{wanted}"   without  --no-deps'
        )
    return version


def wanted_version() -> Requirement:
    """The range of versions, as a requirement."""
    requirements = [Requirement(line) for line in metadata.requires("rlcore-sglang") or []]
    wanted = next(requirement for requirement in requirements if requirement.name == "sglang")
    return Requirement(f"sglang{wanted.specifier}")


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
