"""Packing of rows into micro-batches: first-fit decreasing under a token budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rlcore.data.shares import unit_rows, unit_sums

if TYPE_CHECKING:
    from rlcore.data.batch import Batch


def plan_micro_batches(batch: Batch, max_tokens: int) -> list[list[int]]:
    """Return the row numbers of each micro-batch, in order inside each.

    Units, or rows if the batch has no column `unit_id`, stay whole; one longer than `max_tokens` is alone.

    Example: for rows of 5, 3, 4 and 9 tokens and max_tokens=8, [[3], [0, 1], [2]]
    """
    sizes = batch.unit_sizes()
    lengths = unit_sums(batch.lengths.numpy(), sizes)
    if not len(lengths):
        return []
    if int(lengths.sum()) <= max_tokens:
        return [list(range(len(batch)))]
    bins: list[list[int]] = []
    room: list[int] = []
    for unit in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[unit])
        fitting = next((b for b, left in enumerate(room) if left >= length), None)
        if fitting is None:
            bins.append([unit])
            room.append(max_tokens - length)
        else:
            bins[fitting].append(unit)
            room[fitting] -= length
    return [unit_rows(np.sort(units), sizes).tolist() for units in bins]
