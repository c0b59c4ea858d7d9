"""Rewards that compare the completion with a column. Pure Python; each class is one reward."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

from rlcore.errors import ConfigError, SampleError

NUMBER = re.compile(
    r"(?:(?<![\w).])[-+]\$?|\$[-+]?)?"  # a minus after a digit or a bracket is an operator: 10-3, (4)-3
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]{1,3}(?![0-9]))?"
)
STATED = re.compile(rf"(?:####\s*|\\boxed\{{\s*|answer\s+is:?\s*)({NUMBER.pattern})", re.IGNORECASE)


def to_number(text: str) -> Decimal:
    """Return the value of a match of NUMBER. Example: to_number("$1,234.50") == Decimal("1234.50")"""
    return Decimal(text.replace(",", "").replace("$", ""))


def last_number(text: str) -> Decimal | None:
    """Return the last number in a text. Example: last_number("6 × 7 = 42.") == Decimal(42)"""
    found = NUMBER.findall(text.replace("\u2212", "-"))
    return to_number(found[-1]) if found else None


def gold_number(columns: Mapping[str, object], column: str) -> Decimal:
    """Return the number in the answer column, after "####" if present."""
    text = str(columns[column]).rpartition("####")[2]
    number = last_number(text)
    if number is None:
        raise SampleError(f"column {column!r} holds {text!r:.60}, which has no number")
    return number


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactMatchConfig:
    """Options of `exact_match`."""

    column: str = "answer"
    """Column with the right completion."""
    strip: bool = True
    """Ignore whitespace at both ends of completion and answer."""
    ignore_case: bool = False
    """Ignore upper and lower case."""


class ExactMatch:
    """Scores 1.0 if the completion equals the text in a column, else 0.0.

    Example: rlcore train reward=exact_match data.train=train.jsonl
    """

    Config = ExactMatchConfig

    def __init__(self, config: ExactMatchConfig) -> None:
        self._config = config
        self.required_columns = (config.column,)

    def __call__(self, completion: str, **columns: object) -> float:
        return float(self._normal(completion) == self._normal(str(columns[self._config.column])))

    def _normal(self, text: str) -> str:
        text = text.strip() if self._config.strip else text
        return text.casefold() if self._config.ignore_case else text


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberMatchConfig:
    """Options of `number`."""

    column: str = "answer"
    """Column with the right number."""
    tolerance: float = 0.0
    """Largest accepted absolute difference."""


class NumberMatch:
    """Scores 1.0 if the last number of the completion equals that of a column, else 0.0. Ignores commas, $ and %.

    Example: rlcore train reward=number data.train=train.jsonl
    """

    Config = NumberMatchConfig

    def __init__(self, config: NumberMatchConfig) -> None:
        self._config = config
        self._tolerance = Decimal(str(config.tolerance))
        self.required_columns = (config.column,)

    def __call__(self, completion: str, **columns: object) -> float:
        gold, number = gold_number(columns, self._config.column), last_number(completion)
        return float(number is not None and abs(number - gold) <= self._tolerance)


@dataclass(frozen=True, slots=True, kw_only=True)
class GSM8KConfig:
    """Options of `gsm8k`."""

    column: str = "answer"
    """Column with the solution ("… #### 42") or the plain number."""
    method: Literal["strict", "flexible"] = "flexible"
    """strict: only a stated answer counts; flexible: without one, the last number counts."""


class GSM8K:
    """Scores 1.0 if the answer stated as "#### 42", "\\boxed{42}" or "the answer is 42" is right, else 0.0.

    Example: rlcore train reward=gsm8k data.train=gsm8k.jsonl
    """

    Config = GSM8KConfig

    def __init__(self, config: GSM8KConfig) -> None:
        if config.method not in ("strict", "flexible"):
            raise ConfigError(f"method={config.method!r} is not a method of reward 'gsm8k'\nUse strict or flexible.")
        self._config = config
        self.required_columns = (config.column,)

    def __call__(self, completion: str, **columns: object) -> float:
        return float(self._answer(completion) == gold_number(columns, self._config.column))

    def _answer(self, completion: str) -> Decimal | None:
        stated = STATED.findall(completion.replace("\u2212", "-"))
        if stated:
            return to_number(stated[-1])
        return last_number(completion) if self._config.method == "flexible" else None
