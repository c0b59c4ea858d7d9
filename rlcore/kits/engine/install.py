"""Check of the installed engine against the range of versions in the plugin's pyproject.toml."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import importlib_metadata as metadata
from packaging.requirements import Requirement

from rlcore.errors import UserError
from rlcore.registry.versions import installed_version as installed_version


class EngineMissing(UserError, ImportError):
    """An engine is missing or has an unsupported version."""


def wanted_version(plugin: str, package: str) -> Requirement:
    """Return the supported range of versions. Example: wanted_version("rlcore-vllm", "vllm")"""
    requirements = [Requirement(line) for line in metadata.requires(plugin) or []]  # also those of extras
    wanted = next(requirement for requirement in requirements if requirement.name == package)
    return Requirement(f"{package}{wanted.specifier}")


def check_version(rollout: str, engine: str, wanted: Requirement, packages: Sequence[str], advice: str) -> str:
    """Return the version of the installed engine.

    Args:
        rollout: name of the rollout, and `engine` that of the engine, for errors: "vllm", "vLLM".
        packages: names under which the engine is distributed; the first that is installed counts.
        advice: what to type otherwise.

    Raises:
        EngineMissing: it is not installed, or has another version.
    """
    found = next(((name, version) for name in packages if (version := installed_version(name))), None)
    if found is None:
        raise EngineMissing(f"rollout={rollout} needs {engine}, which is not installed in {sys.prefix}\n{advice}")
    name, version = found
    if not wanted.specifier.contains(version, prereleases=True):
        raise EngineMissing(f"rollout={rollout} requires {wanted}, but {name} {version} is installed\n{advice}")
    return version
