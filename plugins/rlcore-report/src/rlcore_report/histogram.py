"""Histograms of numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

CELLS = 24
"""Number of bins of a histogram."""


def histogram(values: ArrayLike, low: float, high: float) -> list[int]:
    """Count values in CELLS bins of equal width between `low` and `high`."""
    return [int(count) for count in np.histogram(values, bins=CELLS, range=(low, high))[0]]


def summary_of(values: Iterable[float]) -> dict[str, Any]:
    """Return {low, high, counts, mean} of the finite values; empty if there are none."""
    numbers = np.fromiter(values, dtype=np.float64)
    finite = numbers[np.isfinite(numbers)]
    if not len(finite):
        return {}
    low, high = float(finite.min()), float(finite.max())
    high = high if high > low else low + 1.0
    return {"low": low, "high": high, "counts": histogram(finite, low, high), "mean": round(float(finite.mean()), 5)}
