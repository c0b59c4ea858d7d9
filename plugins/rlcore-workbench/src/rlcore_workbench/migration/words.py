"""Values of shell variables, and merging of the values from several branches."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Word:
    """Word after expansion. A variable that the script does not set stays in it as ${NAME}."""

    text: str
    unreadable: str = ""
    """Reason why the value is not known. The text is then as written."""


Value: TypeAlias = Word | tuple[Word, ...]
"""Value of a variable or an array."""


def literal(text: str) -> str:
    """Return why a text cannot be a setting: its dollar signs would be variables in the printed command."""
    return "it holds a literal dollar sign" if "$" in text else ""


def matches(word: Word, patterns: Sequence[str]) -> bool | None:
    """Return whether a known value equals one of the patterns; None if an earlier pattern has wildcards."""
    if word.unreadable or "$" in word.text:
        return None
    for pattern in patterns:
        if pattern in ("*", word.text):
            return True
        if re.search(r"[*?\[$]", pattern):
            return None
    return False


def appended(old: Value, new: Value) -> Value:
    """Return the value of a variable or an array after `name+=value`."""
    if isinstance(new, tuple):
        return (*old, *new) if isinstance(old, tuple) else (*([old] if old != Word("") else []), *new)
    if isinstance(old, tuple):
        return Word("", "text is appended to an array")
    return Word(old.text + new.text, old.unreadable or new.unreadable)


def agreed(values: list[Value | None], line: int) -> Value:
    """Return the value that all branches agree on, or an unreadable one with their values as the reason."""
    first = values[0]
    if first is not None and all(value == first for value in values):
        return first
    if any(isinstance(value, tuple) for value in values):
        return _agreed_array([value if isinstance(value, tuple) else () for value in values], line)
    shown = dict.fromkeys("unset" if value is None else _shown(value) for value in values)
    return Word("", f"branches at line {line} set it differently: {', '.join(shown)}")


def _shown(value: Value) -> str:
    if isinstance(value, tuple) or value.unreadable:
        return "unknown"
    return value.text or "empty"


def _agreed_array(arrays: list[tuple[Word, ...]], line: int) -> tuple[Word, ...]:
    """Return the words of all branches; those missing in a branch, or in another order, are unreadable."""
    common = [[word for word in array if all(word in other for other in arrays)] for array in arrays]
    certain = common[0] if all(words == common[0] for words in common) else []
    reason = f"not all branches at line {line} have it"
    words = dict.fromkeys(word for array in arrays for word in array)
    return tuple(word if word in certain or word.unreadable else replace(word, unreadable=reason) for word in words)
