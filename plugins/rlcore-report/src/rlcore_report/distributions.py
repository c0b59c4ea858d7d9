"""Histograms of rewards and lengths over steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from rlcore_report.run import RecordedRun

CELLS = 24
"""Cells of a histogram."""
MOST_COLUMNS = 120
"""Columns of a picture; steps in between share one."""

_MEASURES: Mapping[str, tuple[str, Callable[[Mapping[str, Any]], float | None]]] = {
    "reward": ("Rewards of the logged samples.", lambda sample: sample.get("reward")),
    "length": ("Characters of the logged responses.", lambda sample: float(len(sample.get("completion", "")))),
}


def distributions(run: RecordedRun) -> dict[str, dict[str, Any]]:
    """Return name -> {words, steps, low, high, counts, mean}; each entry of `counts` is the histogram of a step."""
    samples = [sample for sample in run.samples if sample.get("kind") != "evaluation"]
    return {
        name: found for name, (words, measure) in _MEASURES.items() if (found := _over_steps(samples, words, measure))
    }


def _over_steps(
    samples: Sequence[Mapping[str, Any]], words: str, measure: Callable[[Mapping[str, Any]], float | None]
) -> dict[str, Any]:
    """Group samples by step and count their values in cells between the lowest and the highest of all."""
    measured = [(int(sample["step"]), value) for sample in samples if (value := measure(sample)) is not None]
    if not measured:
        return {}
    first, last = min(step for step, _ in measured), max(step for step, _ in measured)
    width = max(1, -(-(last - first + 1) // MOST_COLUMNS))
    columns: dict[int, list[float]] = {}
    for step, value in measured:
        columns.setdefault(step - (step - first) % width, []).append(value)
    low, high = min(value for _, value in measured), max(value for _, value in measured)
    high = high if high > low else low + 1.0
    steps = sorted(columns)
    return {
        "words": words,
        "steps": steps,
        "low": [low] * len(steps),
        "high": [high] * len(steps),
        "counts": [histogram(columns[step], low, high) for step in steps],
        "mean": [round(fmean(columns[step]), 5) for step in steps],
    }


def histogram(values: Sequence[float], low: float, high: float) -> list[int]:
    """Count values in CELLS cells of equal size between `low` and `high`."""
    counts = [0] * CELLS
    for value in values:
        counts[min(CELLS - 1, max(0, int((value - low) / (high - low) * CELLS)))] += 1
    return counts
