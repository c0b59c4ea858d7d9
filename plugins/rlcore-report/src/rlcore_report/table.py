"""The table of metrics, metrics.toml: the explanation and the healthy range of each metric."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """Explanation of a metric. Example: Explained(group="Reward", name="reward/{name}", meaning="…", healthy="…")"""

    group: str
    name: str
    """Name of the metric; a part in braces stands for any text."""
    meaning: str
    healthy: str
    low: float | None = None
    """Lowest healthy value; None: no bound."""
    high: float | None = None
    """Highest healthy value; None: no bound."""
    advice: str = ""
    """Advice for values outside the healthy range."""

    def explains(self, name: str) -> bool:
        """Return whether this is the explanation of a metric."""
        return re.fullmatch(re.sub(r"\\{\w+\\}", ".+", re.escape(self.name)), name) is not None


@cache
def explanations() -> tuple[Explained, ...]:
    """Return the table, with exact names before names with braces."""
    groups = tomllib.loads(files(__package__).joinpath("metrics.toml").read_text(encoding="utf-8"))
    rows = [Explained(group=group, name=name, **row) for group, named in groups.items() for name, row in named.items()]
    return tuple(rows)


def explanation(name: str) -> Explained | None:
    """Return the explanation of a metric: the first entry with the most specific name."""
    fitting = [it for it in explanations() if it.explains(name)]
    return min(fitting, key=lambda it: it.name.count("{"), default=None)


def in_order(names: Iterable[str]) -> list[str]:
    """Sort metrics in the order of the table; unknown ones come last."""
    place = {row.name: i for i, row in enumerate(explanations())}
    return sorted(names, key=lambda name: (place[row.name] if (row := explanation(name)) else len(place), name))
