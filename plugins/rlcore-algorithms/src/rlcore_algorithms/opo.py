"""OPO: on-policy optimisation with the optimal baseline, arXiv 2505.23585.

    A_i = r_i - Σ_j length_j · r_j / Σ_j length_j   over the responses j to the same prompt

The baseline that makes the variance of the gradient smallest when the gradient of a response grows with its length.
The paper trains exactly on policy: keep epochs=1 and minibatches=1, as is the default. Departure: the loss is the
clipped one of PPO, which has the paper's gradient in the first optimiser step on a sample.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlcore_algorithms.family import Estimator, Family, FamilyConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class OPOConfig(FamilyConfig):
    """Settings of OPO."""

    estimator: Estimator = "opo"


class OPO(Family):
    """Better than the group, long responses counting more."""

    Config = OPOConfig
