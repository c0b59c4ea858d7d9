"""Reward for how long the response is, in tokens or words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlcore.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthConfig:
    """Options of `length`; exactly one of `target` and `max` is set."""

    target: int = 0
    """Best length: 1.0 there, falling in a line to 0.0 at 0 and at twice the target."""
    max: int = 0
    """Longest good length: 1.0 up to there, falling in a line to 0.0 at twice as long."""
    unit: Literal["tokens", "words"] = "tokens"


class Length:
    """1.0 for a response as long as asked, less for others.

    Example: rlcore train reward='{name: length, max: 200}'
    """

    Config = LengthConfig

    def __init__(self, config: LengthConfig) -> None:
        if (config.target > 0) == (config.max > 0) or min(config.target, config.max) < 0:
            raise ConfigError(
                f"target={config.target} and max={config.max} of reward 'length': set exactly one of them\n"
                "Type target=200 (that long) or max=200 (not longer)."
            )
        if config.unit not in ("tokens", "words"):
            raise ConfigError(f"unit={config.unit!r} of reward 'length' is not a unit\nUse tokens or words.")
        self._config = config

    def __call__(self, completion: str, num_tokens: int) -> float:
        length = num_tokens if self._config.unit == "tokens" else len(completion.split())
        wanted = self._config.target or self._config.max
        off = abs(length - wanted) if self._config.target else max(0, length - wanted)
        return max(0.0, 1.0 - off / wanted)
