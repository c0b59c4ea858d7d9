"""Division of rows into shares, without separating the rows of a unit, such as the two responses of a pair.

Adjacent rows with one value in the column `unit_id` form a unit; without this column every row is one.
Shapes: B rows, U units.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

UNIT = "unit_id"


def run_sizes(values: np.ndarray, column: str) -> np.ndarray:
    """Return the number of rows of each unit, [U] int64, in row order, given the column [B] of its rows.

    Raises:
        ValueError: the rows of a unit are not adjacent.
    """
    starts = np.flatnonzero(np.diff(values, prepend=values[:1] - 1))
    units, num_runs = np.unique(values[starts], return_counts=True)
    if len(apart := units[num_runs > 1]):
        raise ValueError(
            f"the rows with {column}={apart[0]} are not adjacent, so they are not a unit\n"
            f"Sort the rows:  batch.take(batch.fetch('{column}').argsort(stable=True))"
        )
    return np.diff(starts, append=len(values))


def unit_rows(units: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the row numbers of some units, int64, given the sizes of all units."""
    return token_index(starts_of(sizes)[units], sizes[units])


def share_sizes(sizes: np.ndarray, num_parts: int) -> list[int]:
    """Return the rows of each share, with numbers of units as equal as possible; shares may be empty."""
    stops = np.cumsum(even_sizes(len(sizes), num_parts))
    return [int(share.sum()) for share in np.split(sizes, stops[:-1])]


def even_sizes(num_rows: int, num_parts: int) -> list[int]:
    """Return part sizes as equal as possible: 5 rows in 2 parts give [3, 2]; parts may be empty."""
    share, rest = divmod(num_rows, num_parts)
    return [share + (part < rest) for part in range(num_parts)]


def balanced_order(lengths: np.ndarray, num_parts: int, sizes: np.ndarray | None = None) -> np.ndarray:
    """Return a row order in which consecutive shares, of `share_sizes`, have about the same number of tokens.

    Assign the longest unit first to the share with the fewest tokens that has room; keep the order inside a share.

    Args:
        sizes: rows of each unit; None: every row is a unit.
    """
    if num_parts == 1:
        return np.arange(len(lengths))
    if sizes is not None:
        return unit_rows(balanced_order(unit_sums(lengths, sizes), num_parts), sizes)
    room = even_sizes(len(lengths), num_parts)
    shares: list[list[int]] = [[] for _ in room]
    lightest = [(0, part) for part, size in enumerate(room) if size]  # a heap
    for row in np.argsort(-lengths, kind="stable").tolist():
        load, part = lightest[0]
        shares[part].append(row)
        if len(shares[part]) < room[part]:
            heapq.heapreplace(lightest, (load + int(lengths[row]), part))
        else:
            heapq.heappop(lightest)
    return np.array([row for share in shares for row in sorted(share)], dtype=np.int64)


def unit_sums(values: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Sum [B] values over each unit, [U]."""
    return np.add.reduceat(values, starts_of(sizes)) if len(sizes) else values[:0]


def starts_of(sizes: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the position at which each part starts: [2, 3, 1] gives [0, 2, 5]."""
    return np.cumsum(sizes) - sizes


def token_index(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the positions of parts that begin at `starts`, [sum(lengths)] int64."""
    total = int(lengths.sum())
    return np.repeat(starts - starts_of(lengths), lengths) + np.arange(total, dtype=np.int64)
