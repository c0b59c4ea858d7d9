"""Packing of rows into micro-batches: first-fit decreasing under a token budget."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def plan_micro_batches(lengths: Sequence[int] | np.ndarray, max_tokens: int) -> list[list[int]]:
    """Return the row numbers of each micro-batch, in order inside each; a row longer than `max_tokens` is alone.

    Example: plan_micro_batches([5, 3, 4, 9], max_tokens=8) == [[3], [0, 1], [2]]
    """
    lengths = np.asarray(lengths)
    if not len(lengths):
        return []
    if int(lengths.sum()) <= max_tokens:
        return [list(range(len(lengths)))]
    bins: list[list[int]] = []
    room: list[int] = []
    for row in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[row])
        fitting = next((b for b, left in enumerate(room) if left >= length), None)
        if fitting is None:
            bins.append([row])
            room.append(max_tokens - length)
        else:
            bins[fitting].append(row)
            room[fitting] -= length
    return [sorted(rows) for rows in bins]
