"""Values of a shell's variables, and what branches of a script agree on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Word:
    """A word after expansion. A variable that only the environment can set stays in it as ${NAME}."""

    text: str
    unreadable: str = ""
    """Why the value is not known. The text is then as written."""


Value: TypeAlias = Word | tuple[Word, ...]
"""A variable or an array."""


def matches(word: Word, patterns: Sequence[str]) -> bool | None:
    """Return whether a known value equals one of the patterns; None where a pattern has wildcards before that."""
    if word.unreadable or "$" in word.text:
        return None
    for pattern in patterns:
        if pattern in ("*", word.text):
            return True
        if re.search(r"[*?\[$]", pattern):
            return None
    return False


def appended(old: Value, new: Value) -> Value:
    """Return what `name+=value` makes of a variable or an array."""
    if isinstance(new, tuple):
        return (*old, *new) if isinstance(old, tuple) else (*([old] if old != Word("") else []), *new)
    if isinstance(old, tuple):
        return Word("", "text is appended to an array")
    return Word(old.text + new.text, old.unreadable or new.unreadable)


def agreed(values: list[Value | None], line: int) -> Value:
    """Return the value that all branches give, or one that says that they differ."""
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
    """Return the words of all branches; those that are not in every one, or in another order, are unreadable."""
    common = [[word for word in array if all(word in other for other in arrays)] for array in arrays]
    certain = common[0] if all(words == common[0] for words in common) else []
    reason = f"only one of the branches at line {line} has it"
    words = dict.fromkeys(word for array in arrays for word in array)
    return tuple(word if word in certain or word.unreadable else replace(word, unreadable=reason) for word in words)
