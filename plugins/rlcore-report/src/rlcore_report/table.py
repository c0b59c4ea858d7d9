"""The table of metrics, metrics.toml: the explanation and the healthy range of each metric.

python -m rlcore_report.table > docs/metrics.md
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator
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


def unexplained(names: Iterable[str]) -> list[str]:
    """Return the metrics that are missing from the table."""
    return sorted(name for name in names if explanation(name) is None)


def in_order(names: Iterable[str]) -> list[str]:
    """Sort metrics in the order of the table; unknown ones come last."""
    place = {row.name: i for i, row in enumerate(explanations())}
    return sorted(names, key=lambda name: (place[row.name] if (row := explanation(name)) else len(place), name))


def page() -> str:
    """Return docs/metrics.md."""
    parts = [
        "# Metrics",
        "Generated from `plugins/rlcore-report/src/rlcore_report/metrics.toml` by"
        " `python -m rlcore_report.table > docs/metrics.md`; do not edit.",
        "Trackers receive these numbers after every step. `rlcore show RUN` and `rlcore report RUN` (package"
        " [`rlcore-report`](../plugins/rlcore-report)) show them with their history and warn outside of the ranges in"
        " the column *warns*. Ranges are rules of thumb for policy gradients; a metric in braces stands for several.",
        *_groups(),
    ]
    return "\n\n".join(parts) + "\n"


def _groups() -> Iterator[str]:
    for group in dict.fromkeys(row.group for row in explanations()):
        yield f"## {group}"
        lines = ["| metric | meaning | healthy | warns |", "|---|---|---|---|"]
        for row in explanations():
            if row.group == group:
                lines.append(f"| `{row.name}` | {row.meaning} | {row.healthy} | {_warns(row)} |")
        yield "\n".join(lines)


def _warns(row: Explained) -> str:
    bounds = [f"below {row.low:g}"] if row.low is not None else []
    bounds += [f"above {row.high:g}"] if row.high is not None else []
    return f"{' or '.join(bounds)}: {row.advice}" if bounds else ""


if __name__ == "__main__":
    print(page(), end="")
