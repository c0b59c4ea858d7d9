"""Adaptive coefficient of the entropy bonus: Skywork-OR1, arXiv 2505.22312, section 4.

With e the mean entropy of the policy per token, in nats, and c the coefficient of a step:

    bonus = c · entropy if e <= target, else 0;   next step: c + delta if e < target, c - delta if e > target

The paper starts at c = 0, with target = 0.2 and delta = 0.005. Departures:
1. c stays between `min` and `max`.
2. e is measured in the updates of the step before, which needs no forward pass; before it is known, the bonus is applied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from rlcore.errors import require


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveEntropyConfig:
    """Adaptive coefficient of the entropy bonus, which starts at `entropy_coefficient`."""

    target: float = 0.0
    """Entropy per token, in nats, below which the coefficient rises and above which it falls; 0: it is constant."""
    delta: float = 5e-3
    """Change of the coefficient in each step."""
    min: float = 0.0
    """Smallest coefficient."""
    max: float = 1.0
    """Largest coefficient."""

    def __post_init__(self) -> None:
        require(self.target >= 0, "target", "0 or more", self.target, 0.2)
        require(self.delta > 0, "delta", "more than 0", self.delta, 5e-3)
        require(self.min >= 0, "min", "0 or more", self.min, 0.0)
        require(self.max > self.min, "max", f"more than min={self.min}", self.max, 1.0)


class EntropyController:
    """Coefficient of the entropy bonus: constant, or adapted to a target."""

    def __init__(self, config: AdaptiveEntropyConfig, coefficient: float) -> None:
        self._config = config
        self._coefficient = coefficient
        self._entropy: float | None = None
        """Entropy of the step before."""

    @property
    def adapts(self) -> bool:
        return self._config.target > 0

    @property
    def coefficient(self) -> float:
        """Coefficient of this step; 0 while the entropy is above the target."""
        above = self.adapts and self._entropy is not None and self._entropy > self._config.target
        return 0.0 if above else self._coefficient

    def observe(self, entropy: float) -> None:
        """Adapt the coefficient to the mean entropy of a step; one that is not finite changes nothing."""
        if not self.adapts or not isfinite(entropy):
            return
        self._entropy = entropy
        if entropy != self._config.target:
            change = self._config.delta if entropy < self._config.target else -self._config.delta
            self._coefficient = min(self._config.max, max(self._config.min, self._coefficient + change))

    def state_dict(self) -> dict[str, Any]:
        return {"coefficient": self._coefficient, "entropy": self._entropy}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._coefficient, self._entropy = state["coefficient"], state["entropy"]
