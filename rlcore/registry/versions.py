"""Requirements in the metadata of a package, their only source, and whether the installed packages meet them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import importlib_metadata as metadata

from rlcore.errors import ConfigError

if TYPE_CHECKING:
    from packaging.requirements import Requirement


def installed_version(package: str) -> str:
    """Return the version of an installed package; empty if it is not installed."""
    try:
        return str(metadata.version(package))
    except metadata.PackageNotFoundError:
        return ""


def requirements(package: str, extra: str = "") -> list[Requirement]:
    """Return the requirements of an installed package that apply on this machine, and those of an extra.

    Raises:
        PackageNotFoundError: the package is not installed.
        ValueError: a requirement is invalid.
    """
    from packaging.requirements import Requirement

    parsed = [Requirement(text) for text in metadata.requires(package) or []]
    return [it for it in parsed if it.marker is None or it.marker.evaluate({"extra": extra})]


def check_versions(package: str, user: str, extra: str = "") -> None:
    """Check every requirement of a package. Example: check_versions("rlcore-fsdp", "backend=fsdp", "lora")

    Args:
        user: the setting that the user typed, for the message.
        extra: include the requirements of this extra.

    Raises:
        ConfigError: a package is missing or has another version.
    """
    for requirement in requirements(package, extra):
        wanted = f"{requirement.name}{requirement.specifier}"
        found = installed_version(requirement.name)
        if not found:
            whole = f"{package}[{extra}]" if extra else package
            raise ConfigError(f"{user} needs {wanted}, which is not installed\nType  pip install '{whole}'")
        if not requirement.specifier.contains(found, prereleases=True):
            raise ConfigError(
                f"{user} was written for {wanted}, and {requirement.name} {found} is installed\n"
                f"Type  pip install '{wanted}'"
            )
