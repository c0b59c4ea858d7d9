"""Two rewards for rlcore: a function, and a class with settings and metrics.

    rlcore train preset=quickstart reward=ascending

and, for rows such as {"prompt": "Use 3, 5 and 7 to make 26.", "numbers": [3, 5, 7], "target": 26},
reward=countdown.
"""

from __future__ import annotations

import ast
import operator
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from rlcore import RewardResult

EXAMPLES = {
    "ascending": [
        ({"completion": "12345", "digits": "31254"}, 1.0),
        ({"completion": "13245", "digits": "31254"}, 0.8),  # 1 2 4 5 are ascending: 4 of 5
        ({"completion": "11111", "digits": "31254"}, 0.0),
        ({"completion": "1234", "digits": "31254"}, 0.0),
    ],
    "Countdown": [
        ({"completion": "So 3 * 7 + 5", "numbers": [3, 5, 7], "target": 26}, 1.0),
        ({"completion": "So 3 * 7 + 3", "numbers": [3, 5, 7], "target": 24}, 0.0),  # 3 is given only once
        ({"completion": "So 3 * 7", "numbers": [3, 5, 7], "target": 26}, 0.1),
        ({"completion": "1 / (3 - 3)", "numbers": [1, 3, 3], "target": 1}, 0.1),
        ({"completion": "I do not know", "numbers": [3, 5, 7], "target": 26}, 0.0),
    ],
}
"""Reward -> samples with their scores; used by `rlcore check` and the contract tests."""

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_MAX_LENGTH = 200


def ascending(completion: str, digits: str) -> float:
    """Score the length of the longest ascending subsequence, as a share; 0 unless it has exactly `digits`."""
    if sorted(completion) != sorted(str(digits)) or not completion:
        return 0.0
    tails: list[str] = []
    """Smallest last character of an ascending subsequence of each length."""
    for character in completion:
        place = bisect_right(tails, character)
        tails[place : place + 1] = [character]
    return len(tails) / len(completion)


@dataclass(frozen=True, slots=True, kw_only=True)
class CountdownConfig:
    """Settings, typed as reward='[{name: countdown, near: 0.2}]'."""

    near: float = 0.1
    """Score of an expression with allowed numbers and a wrong result."""


class Countdown:
    """1 if the expression at the end equals `target` and uses each of `numbers` at most once."""

    Config = CountdownConfig

    def __init__(self, config: CountdownConfig) -> None:
        self._config = config

    def __call__(self, completion: str, target: int, numbers: Sequence[int]) -> RewardResult:
        """Score the completion; metrics are logged as reward/countdown/form and reward/countdown/numbers."""
        tree = expression_at_end(completion)
        allowed = tree is not None and not numbers_of(tree) - Counter(map(int, numbers))
        score = 0.0
        if tree is not None and allowed:
            score = 1.0 if value(tree) == int(target) else self._config.near
        return RewardResult(score, metrics={"form": float(tree is not None), "numbers": float(allowed)})


def expression_at_end(text: str) -> ast.expr | None:
    """Return the longest arithmetic expression at the end of the last line, or None."""
    line = (text.strip().splitlines() or [""])[-1][-_MAX_LENGTH:].strip(" .")
    for start in range(len(line)):
        if start and line[start - 1].isalnum():
            continue
        try:
            tree = ast.parse(line[start:].strip(), mode="eval").body
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            continue
        if is_arithmetic(tree):
            return tree
    return None


def is_arithmetic(tree: ast.expr) -> bool:
    """Return True if the expression contains only integers and + - * /."""
    if isinstance(tree, ast.BinOp):
        return type(tree.op) in _OPERATORS and is_arithmetic(tree.left) and is_arithmetic(tree.right)
    return isinstance(tree, ast.Constant) and type(tree.value) is int


def numbers_of(tree: ast.expr) -> Counter[int]:
    """Count the numbers in an expression."""
    constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return Counter(constant for constant in constants if isinstance(constant, int))


def value(tree: ast.expr) -> Fraction | None:
    """Return the exact value of an expression, or None for a division by zero."""
    if isinstance(tree, ast.BinOp):
        left, right = value(tree.left), value(tree.right)
        if left is None or right is None or (isinstance(tree.op, ast.Div) and right == 0):
            return None
        return Fraction(_OPERATORS[type(tree.op)](left, right))
    assert isinstance(tree, ast.Constant) and isinstance(tree.value, int)
    return Fraction(tree.value)
