"""OPO: on-policy optimization with the optimal baseline, arXiv 2505.23585.

    A_i = r_i - Σ_j length_j · r_j / Σ_j length_j   over the responses j to the same prompt

This baseline minimizes the variance of the gradient if the gradient of a response grows with its length. The
paper trains exactly on policy: keep the defaults epochs=1 and minibatches=1. Departure: the loss is PPO's
clipped loss, which has the paper's gradient in the first optimizer step on a sample.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlcore_algorithms.family import Estimator, Family, FamilyConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class OPOConfig(FamilyConfig):
    """Settings of OPO."""

    estimator: Estimator = "opo"


class OPO(Family):
    """Policy gradient with a baseline weighted by response length."""

    Config = OPOConfig
