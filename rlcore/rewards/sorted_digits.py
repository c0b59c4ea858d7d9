"""The reward of the quickstart: a task that a tiny model learns in a minute, `sort 4291=` -> `1249`."""

from __future__ import annotations

from itertools import pairwise


def sorted_digits(completion: str, digits: str, finish_reason: str) -> float:
    """1.0 for the column `digits` in ascending order; half the share of ordered neighbours for another permutation.

    0.0 when digits are lost or invented, or when the completion did not end by itself.

    Example: rlcore train reward=sorted_digits data.train=digits.jsonl
    """
    right = sorted(str(digits))
    if finish_reason != "stop" or sorted(completion) != right:
        return 0.0
    if list(completion) == right:
        return 1.0
    pairs = list(pairwise(completion))
    return 0.5 * sum(left <= after for left, after in pairs) / len(pairs)
