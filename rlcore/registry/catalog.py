"""The catalog: every plugin that is installed, read from package metadata without importing one of them.

`rlcore list-plugins` uses nothing else; `resolve` starts here. One pass over the installed distributions, memoised in the
process; there is no cache on disk (it would save 10 ms and cost invalidation).
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
DISABLE = "RLCORE_DISABLE_PLUGINS"
IGNORE_VERSIONS = "RLCORE_IGNORE_VERSIONS"


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """One plugin. Example: Entry("rollout", "vllm", "rlcore-vllm", "0.1.0", "rlcore_vllm.rollout:VLLMRollout", "rlcore>=0.1")"""

    kind: str
    name: str
    package: str
    version: str
    target: str
    requires: str
    """The package's own requirement on rlcore; empty when it has none."""


class Catalog:
    """The installed plugins, sorted by kind, name and package."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries = tuple(sorted(entries))

    @classmethod
    def from_path(cls, paths: Sequence[str] | None = None) -> Catalog:
        """Read the metadata of all distributions on `paths` (default: sys.path)."""
        return cls(_scan(paths))

    def of(self, kind: str) -> list[Entry]:
        """All plugins of a kind, hidden ones too."""
        return [entry for entry in self.entries if entry.kind == kind]

    def find(self, kind: str, name: str) -> list[Entry]:
        """All plugins of a kind with this name, hidden ones too."""
        return [entry for entry in self.of(kind) if entry.name == name]

    def hidden(self, entry: Entry) -> str | None:
        """The word of RLCORE_DISABLE_PLUGINS that hides an entry, or None."""
        words = self._hidden_words
        return next((word for word in words if word in (entry.name, entry.package)), None)

    @cached_property
    def _hidden_words(self) -> list[str]:
        words = words_of(DISABLE)
        known = {name for entry in self.entries for name in (entry.name, entry.package)}
        for word in words:
            if word not in known:
                warnings.warn(f"{DISABLE} names '{word}', which is no installed plugin or package", stacklevel=2)
        return words


_catalog: Catalog | None = None


def catalog() -> Catalog:
    """The catalog of this process."""
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
    """The comma-separated words of an environment variable."""
    return [word.strip() for word in os.environ.get(variable, "").split(",") if word.strip()]


def normalise(package: str) -> str:
    """A distribution name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", package).lower()


def _scan(paths: Sequence[str] | None) -> Iterator[Entry]:
    import importlib_metadata as metadata

    distributions = metadata.distributions() if paths is None else metadata.distributions(path=list(paths))
    seen: set[str] = set()
    for distribution in distributions:
        points = [point for point in distribution.entry_points if point.group.startswith(PREFIX)]
        name = _name(distribution, needed=bool(points))
        if name in seen:  # first on the path wins, as for imports
            continue
        seen.add(name)
        if not points:
            continue
        requires = _requires_rlcore(distribution.requires or [])
        for point in points:
            kind = point.group.removeprefix(PREFIX)
            yield Entry(kind, point.name, name, distribution.version, point.value, requires)


def _name(distribution: Any, *, needed: bool) -> str:
    """Normalised name; from the directory name when the metadata need not be parsed."""
    path = getattr(distribution, "_path", None)
    stem = path.name.partition("-")[0] if path is not None and not needed else ""
    return normalise(stem or distribution.metadata["Name"] or "")


def _requires_rlcore(requirements: Sequence[str]) -> str:
    found = [r.partition(";")[0].strip() for r in requirements if re.match(r"rlcore\s*([<>=!~(\s;]|$)", r)]
    return ",".join(item.removeprefix("rlcore").strip(" ()") for item in found)
