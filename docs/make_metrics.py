"""Generate docs/metrics.md from the table of rlcore-report:  python docs/make_metrics.py"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlcore_report.table import Explained, explanations

TARGET = Path(__file__).with_name("metrics.md")


def page() -> str:
    """Return docs/metrics.md."""
    parts = [
        "# Metrics",
        "Generated from `plugins/rlcore-report/src/rlcore_report/metrics.toml` by"
        " `python docs/make_metrics.py`; do not edit.",
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
    TARGET.write_text(page(), encoding="utf-8")
