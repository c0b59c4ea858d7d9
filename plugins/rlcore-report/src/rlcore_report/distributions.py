"""Distributions over steps: of all samples if the hooks `report` recorded them, otherwise of the logged samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlcore_report.histogram import histogram, summary_of
from rlcore_report.run import RecordedRun

MOST_COLUMNS = 120
"""Maximum number of columns in a chart."""

_RECORDED = {
    "reward": "Rewards of all samples.",
    "length": "Tokens of all responses.",
    "lag": "Weight updates between the generation of a sample and the step that learns from it.",
}
_LOGGED: Mapping[str, tuple[str, Callable[[Mapping[str, Any]], float | None]]] = {
    "reward": ("Rewards of the logged samples.", lambda sample: sample.get("reward")),
    "length": ("Characters of the logged responses.", lambda sample: float(len(sample.get("completion", "")))),
}


def distributions(run: RecordedRun) -> dict[str, dict[str, Any]]:
    """Return name -> {words, steps, low, high, counts, mean}; each entry of `counts` is the histogram of a step."""
    if run.distributions:
        found = {name: _recorded(run.distributions, name, words) for name, words in _RECORDED.items()}
    else:
        samples = [sample for sample in run.samples if sample.get("kind") != "evaluation"]
        found = {name: _logged(samples, words, measure) for name, (words, measure) in _LOGGED.items()}
    return {name: picture for name, picture in found.items() if picture}


def _recorded(rows: Sequence[Mapping[str, Any]], name: str, words: str) -> dict[str, Any]:
    """Return every k-th recorded histogram, with k such that at most MOST_COLUMNS remain."""
    kept = [row for row in rows if isinstance(row.get(name), Mapping)]
    every = max(1, -(-len(kept) // MOST_COLUMNS))
    kept = kept[::every]
    if not kept or all(row[name]["low"] == 0 == row[name]["mean"] for row in kept):
        return {}  # such as the lag of a schedule that waits for every phase
    columns = {key: [row[name][key] for row in kept] for key in ("low", "high", "counts", "mean")}
    return {"words": words, "steps": [row["step"] for row in kept], **columns}


def _logged(
    samples: Sequence[Mapping[str, Any]], words: str, measure: Callable[[Mapping[str, Any]], float | None]
) -> dict[str, Any]:
    """Group samples by step and count their values in bins between the lowest and the highest value of all."""
    measured = [(int(sample["step"]), value) for sample in samples if (value := measure(sample)) is not None]
    if not measured:
        return {}
    first, last = min(step for step, _ in measured), max(step for step, _ in measured)
    width = max(1, -(-(last - first + 1) // MOST_COLUMNS))
    columns: dict[int, list[float]] = {}
    for step, value in measured:
        columns.setdefault(step - (step - first) % width, []).append(value)
    whole = summary_of(value for _, value in measured)
    low, high, steps = whole["low"], whole["high"], sorted(columns)
    return {
        "words": words,
        "steps": steps,
        "low": [low] * len(steps),
        "high": [high] * len(steps),
        "counts": [histogram(columns[step], low, high) for step in steps],
        "mean": [summary_of(columns[step])["mean"] for step in steps],
    }
