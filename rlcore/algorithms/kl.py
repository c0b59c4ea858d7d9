"""KL divergence to the reference: per-token estimators, and the controller of the penalty's coefficient.

With r = p_ref / p and tokens sampled from p (Schulman, "Approximating KL divergence", 2020):
    k1 = -log r                  unbiased, high variance, may be negative
    k2 = (log r)² / 2            biased, but with the gradient of the KL
    k3 = r - 1 - log r           unbiased, low variance, never negative
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from rlcore.errors import require

Estimator = Literal["k1", "k2", "k3"]
_MAX_LOG_RATIO = 20.0
"""exp(20) = 5e8; larger ratios carry no information and would overflow k3 in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KLConfig:
    """Penalty for diverging from the reference."""

    coefficient: float = 0.0
    """Weight of the penalty; 0: no penalty, and no reference model unless `monitor`."""
    where: Literal["loss", "reward"] = "loss"
    """Add the penalty to the loss, or subtract it from the reward."""
    estimator: Estimator = "k3"
    """Estimator of the KL per token."""
    controller: Literal["fixed", "adaptive"] = "fixed"
    """adaptive: change the coefficient during training to reach `target`."""
    target: float = 0.1
    """Target KL per response of the adaptive controller, which requires where=reward."""
    horizon: float = 10000.0
    """Number of responses over which the adaptive controller changes the coefficient."""
    monitor: bool = False
    """Load a reference and log the KL even without a penalty."""
    sync_every_steps: int = 0
    """Move the reference toward the policy after every n-th step; 0: never."""
    sync_mix: float = 1.0
    """Share of the policy in the new reference, whose parameters become (1 - mix) · reference + mix · policy."""

    def __post_init__(self) -> None:
        require(self.coefficient >= 0, "coefficient", "0 or more", self.coefficient, 0.01)
        adaptive = self.controller == "adaptive"
        require(
            not adaptive or self.where == "reward", "where", "reward with controller=adaptive", self.where, "reward"
        )
        aims = not adaptive or self.coefficient > 0
        require(
            aims, "coefficient", "more than 0 with controller=adaptive, which multiplies it", self.coefficient, 0.01
        )
        pulls = self.coefficient == 0 or self.where == "reward" or self.estimator != "k1"
        require(pulls, "estimator", "k2 or k3 in a loss: there k1 has no gradient on average", self.estimator, "k3")
        require(self.target > 0, "target", "more than 0", self.target, 0.1)
        require(self.horizon > 0, "horizon", "more than 0", self.horizon, 10000.0)
        every, loaded = self.sync_every_steps, self.coefficient > 0 or self.monitor
        require(every >= 0, "sync_every_steps", "0 or more", every, 100)
        require(loaded or not every, "coefficient", "more than 0 with sync_every_steps", self.coefficient, 0.01)
        require(0 < self.sync_mix <= 1, "sync_mix", "more than 0, at most 1", self.sync_mix, 0.5)


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, estimator: Estimator) -> Tensor:
    """Return the estimate for each token, in the shape of the inputs."""
    log_ratio = ref_log_probs - log_probs
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio**2
    bounded = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return torch.expm1(bounded) - bounded


class KLController:
    """Coefficient of the KL penalty: constant, or adapted to a target.

    Adaptive, arXiv 1909.08593, section 2.2: e = clip(KL / target - 1, -0.2, 0.2); coefficient *= 1 + e · n / horizon.
    """

    def __init__(self, config: KLConfig) -> None:
        self._config = config
        self.coefficient = config.coefficient

    def observe(self, kl: float, num_samples: int) -> None:
        """Adapt the coefficient to this step's mean KL per response, over `num_samples` responses."""
        if self._config.controller == "adaptive":
            error = min(0.2, max(-0.2, kl / self._config.target - 1.0))
            self.coefficient *= 1.0 + error * num_samples / self._config.horizon

    def state_dict(self) -> dict[str, Any]:
        return {"coefficient": self.coefficient}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.coefficient = float(state["coefficient"])
