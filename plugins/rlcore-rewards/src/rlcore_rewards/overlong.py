"""A penalty for responses close to the token limit: DAPO, arXiv 2503.14476, eq. 13."""

from __future__ import annotations

from dataclasses import dataclass

from rlcore.errors import require, require_at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlongConfig:
    """Options of `overlong`."""

    limit: int
    """Limit in tokens, usually sampling.max_response_tokens."""
    buffer: int
    """Number of tokens before the limit over which the penalty grows."""
    factor: float = 1.0
    """Penalty at the limit."""

    def __post_init__(self) -> None:
        require_at_least(self, limit=1, factor=0)
        require(1 <= self.buffer <= self.limit, "buffer", f"1 to limit={self.limit}", self.buffer, self.limit)


class Overlong:
    """Penalty of 0 up to limit - buffer tokens, falling linearly to -factor at the limit.

    Example: rlcore train reward='[gsm8k, {name: overlong, limit: 512, buffer: 128}]'
    """

    Config = OverlongConfig

    def __init__(self, config: OverlongConfig) -> None:
        self._config = config

    def __call__(self, completion: str, num_tokens: int) -> float:
        config = self._config
        over = num_tokens - (config.limit - config.buffer)
        return -config.factor * min(1.0, max(0.0, over / config.buffer))
