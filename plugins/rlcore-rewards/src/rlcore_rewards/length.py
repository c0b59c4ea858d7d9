"""Reward for the length of the response, in tokens or words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlcore.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthConfig:
    """Options of `length`; set exactly one of `target` and `max`."""

    target: int = 0
    """Best length: scores 1.0, falling linearly to 0.0 at length 0 and at twice the target."""
    max: int = 0
    """Maximum good length: scores 1.0 up to it, falling linearly to 0.0 at twice that length."""
    unit: Literal["tokens", "words"] = "tokens"
    """Unit of `target` and `max`."""


class Length:
    """Scores 1.0 for a response of the wanted length, less for others.

    Example: rlcore train reward='{name: length, max: 200}'
    """

    Config = LengthConfig

    def __init__(self, config: LengthConfig) -> None:
        if (config.target > 0) == (config.max > 0) or min(config.target, config.max) < 0:
            raise ConfigError(
                f"target={config.target} and max={config.max} of reward 'length': set exactly one of them\n"
                "Type target=200 (exactly) or max=200 (at most)."
            )
        if config.unit not in ("tokens", "words"):
            raise ConfigError(f"unit={config.unit!r} of reward 'length' is not a unit\nUse tokens or words.")
        self._config = config

    def __call__(self, completion: str, num_tokens: int) -> float:
        length = num_tokens if self._config.unit == "tokens" else len(completion.split())
        wanted = self._config.target or self._config.max
        off = abs(length - wanted) if self._config.target else max(0, length - wanted)
        return max(0.0, 1.0 - off / wanted)
