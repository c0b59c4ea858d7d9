"""Reward of the quickstart task, which a tiny model learns in a minute: `sort 4291=` -> `1249`."""

from __future__ import annotations

from itertools import pairwise


def sorted_digits(completion: str, digits: str, finish_reason: str) -> float:
    """Return 1.0 for the column `digits` in ascending order; half the fraction of ordered pairs for other permutations.

    Return 0.0 if digits are missing or extra, or if the completion did not stop by itself.

    Example: rlcore train reward=sorted_digits data.train=digits.jsonl
    """
    right = sorted(str(digits))
    if finish_reason != "stop" or sorted(completion) != right:
        return 0.0
    if list(completion) == right:
        return 1.0
    pairs = list(pairwise(completion))
    return 0.5 * sum(left <= after for left, after in pairs) / len(pairs)
