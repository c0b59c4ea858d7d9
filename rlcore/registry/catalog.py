"""The catalog of installed plugins, read from package metadata without importing them.

`rlcore list-plugins` uses only the catalog; `resolve` starts here. It takes one pass over the installed distributions
and is cached in the process, but not on disk (that would save 10 ms and require invalidation).
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

PREFIX = "rlcore."
KINDS = (
    "algorithm",
    "backend",
    "command",
    "config",
    "dataset",
    "dispatch",
    "environment",
    "hooks",
    "reward",
    "rollout",
    "tracker",
    "transfer",
    "worker",
)
MODULE_KINDS = ("config", "hooks")
"""Kinds whose entry points may name a module, without an attribute."""
_DIRECTORY = re.compile(r"(.+?)(-\d[^-]*)?(-py\d[\d.]*)?\.(dist|egg)-info")
DISABLE = "RLCORE_DISABLE_PLUGINS"
IGNORE_VERSIONS = "RLCORE_IGNORE_VERSIONS"


@dataclass(frozen=True, slots=True, order=True)
class PluginSpec:
    """A plugin as plain data, with which every process imports the same object.

    Example: PluginSpec("rollout", "vllm", "rlcore-vllm", "0.1.0", "rlcore_vllm.rollout:VLLMRollout")
    """

    kind: str
    name: str
    package: str
    """Package that provides the plugin; empty for project code."""
    version: str
    target: str
    """module:attribute or /path/file.py:attribute."""


@dataclass(frozen=True, slots=True, order=True)
class Entry(PluginSpec):
    """An installed plugin."""

    requires: str
    """Versions of rlcore that the package requires, such as ">=0.1,<0.2"; empty: any."""


class Catalog:
    """The installed plugins, sorted by kind, name and package."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries = tuple(sorted(entries))

    @classmethod
    def from_path(cls, paths: Sequence[str] | None = None) -> Catalog:
        """Read the metadata of all distributions on `paths` (default: sys.path)."""
        return cls(_scan(paths))

    def of(self, kind: str) -> list[Entry]:
        """Return all plugins of a kind, including hidden ones."""
        return [entry for entry in self.entries if entry.kind == kind]

    def find(self, kind: str, name: str) -> list[Entry]:
        """Return all plugins of a kind with this name, including hidden ones."""
        return [entry for entry in self.of(kind) if entry.name == name]

    def hidden(self, entry: Entry) -> str | None:
        """Return the entry of RLCORE_DISABLE_PLUGINS that hides a plugin, or None."""
        return next((word for word in self._hidden_words if names(word, entry)), None)

    @cached_property
    def _hidden_words(self) -> list[str]:
        words = words_of(DISABLE)
        for word in words:
            if not any(names(word, entry) for entry in self.entries):
                warnings.warn(f"{DISABLE} names '{word}', which is not an installed plugin or package", stacklevel=2)
        return words


_catalog: Catalog | None = None


def catalog() -> Catalog:
    """Return the catalog of this process."""
    global _catalog
    if _catalog is None:
        _catalog = Catalog.from_path()
    return _catalog


def refresh() -> Catalog:
    """Read the metadata again, after an installation in a running process."""
    global _catalog
    _catalog = None
    return catalog()


def words_of(variable: str) -> list[str]:
    """Return the comma-separated words of an environment variable."""
    return [word.strip() for word in os.environ.get(variable, "").split(",") if word.strip()]


def names(word: str, entry: Entry) -> bool:
    """Return whether a word of RLCORE_DISABLE_PLUGINS names this plugin or, in any spelling, its package."""
    return word == entry.name or normalize(word) == entry.package


def normalize(package: str) -> str:
    """Normalize a distribution name as in PEP 503."""
    return re.sub(r"[-_.]+", "-", package).lower()


def is_compatible(entry: Entry, core_version: str) -> bool:
    """Return whether the package's requirement, if any, admits this version of rlcore."""
    if not entry.requires or entry.package in map(normalize, words_of(IGNORE_VERSIONS)):
        return True
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(entry.requires).contains(core_version, prereleases=True)


def _scan(paths: Sequence[str] | None) -> Iterator[Entry]:
    import importlib_metadata as metadata

    distributions = metadata.distributions() if paths is None else metadata.distributions(path=list(paths))
    seen: set[str] = set()
    for distribution in distributions:
        folder = getattr(distribution, "_path", None)
        match = _DIRECTORY.fullmatch(folder.name) if folder is not None else None
        try:
            name = normalize(match[1] if match else distribution.metadata["Name"])
            entries = [] if name in seen else _entries(distribution, name)  # first on the path wins, as for imports
        except (LookupError, TypeError, ValueError, OSError) as error:
            warnings.warn(
                f"the metadata of {folder or distribution} cannot be read ({type(error).__name__}: {error}); "
                "its plugins are ignored. Reinstall the package.",
                stacklevel=2,
            )
            continue
        seen.add(name)
        yield from entries


def _entries(distribution: Any, package: str) -> list[Entry]:
    """Return the plugins of a distribution; if it has none, only one file is read."""
    if PREFIX not in (distribution.read_text("entry_points.txt") or ""):
        return []
    points = [point for point in distribution.entry_points if point.group.startswith(PREFIX)]
    if not points:
        return []
    version = distribution.metadata.get("Version")  # parses the metadata, as `requires` does
    if not version:
        raise LookupError("no version")
    requires = _requires_rlcore(distribution.requires or [])
    return [
        Entry(point.group.removeprefix(PREFIX), point.name, package, version, point.value, requires) for point in points
    ]


def _requires_rlcore(requirements: Sequence[str]) -> str:
    """Return the version specifiers for rlcore that apply here, lower bound first."""
    from packaging.requirements import Requirement

    parsed = [Requirement(text) for text in requirements if normalize(text).startswith("rlcore")]
    own = [
        it
        for it in parsed
        if normalize(it.name) == "rlcore" and (it.marker is None or it.marker.evaluate({"extra": ""}))
    ]
    return ",".join(sorted({str(specifier) for it in own for specifier in it.specifier}, reverse=True))
