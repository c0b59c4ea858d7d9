"""Compare installed packages with the version ranges in a plugin's metadata, their only source."""

from __future__ import annotations

from importlib import metadata

from rlcore.errors import ConfigError


def check_versions(package: str, user: str, extra: str = "") -> None:
    """Check every requirement of a package. Example: check_versions("rlcore-fsdp", "backend=fsdp", "lora")

    Args:
        user: the setting that the user typed, for the message.
        extra: include the requirements of this extra.

    Raises:
        ConfigError: a package is missing or has another version.
    """
    from packaging.requirements import Requirement

    for text in metadata.requires(package) or []:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        wanted = f"{requirement.name}{requirement.specifier}"
        try:
            found = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            whole = f"{package}[{extra}]" if extra else package
            raise ConfigError(f"{user} needs {wanted}, which is not installed\nType  pip install '{whole}'") from None
        if not requirement.specifier.contains(found, prereleases=True):
            raise ConfigError(
                f"{user} was written for {wanted}, and {requirement.name} {found} is installed\n"
                f"Type  pip install '{wanted}'"
            )
