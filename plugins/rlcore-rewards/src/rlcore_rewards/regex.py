"""Reward for completions that match a pattern."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rlcore.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RegexConfig:
    """Options of `regex`."""

    pattern: str
    """Python regular expression."""
    full: bool = False
    """Match the whole completion instead of a part of it."""


class Regex:
    """Scores 1.0 if the completion matches a pattern, else 0.0.

    Example: rlcore train reward='{name: regex, pattern: "<answer>.*</answer>"}'
    """

    Config = RegexConfig

    def __init__(self, config: RegexConfig) -> None:
        try:
            compiled = re.compile(config.pattern)
        except re.error as error:
            raise ConfigError(
                f"pattern={config.pattern!r} of reward 'regex' is not a regular expression: {error}\n"
                "Escape special characters with a backslash: \\( \\[ \\*"
            ) from error
        self._match = compiled.fullmatch if config.full else compiled.search

    def __call__(self, completion: str) -> float:
        return float(self._match(completion) is not None)
