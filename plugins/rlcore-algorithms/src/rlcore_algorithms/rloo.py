"""RLOO: REINFORCE leave-one-out, arXiv 2402.14740 (Kool et al. 2019).

    A_i = r_i - mean of r over the other responses to the same prompt = n/(n-1) · (r_i - mean of the group)

Departures:
1. The loss is PPO's clipped loss, which has the paper's gradient in the first optimizer step on a sample.
2. The paper sums over the tokens of a response, `average=seq-mean-token-sum`, and has the KL penalty in the
   reward; here the sum is the default, and the penalty is off until `kl.coefficient` is set.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rlcore.algorithms.kl import KLConfig
from rlcore.types import Average
from rlcore_algorithms.family import Estimator, Family, FamilyConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RLOOConfig(FamilyConfig):
    """Settings of RLOO."""

    estimator: Estimator = "rloo"
    average: Average = "seq-mean-token-sum"
    kl: KLConfig = field(default_factory=lambda: KLConfig(where="reward", estimator="k1"))


class RLOO(Family):
    """Policy gradient with the mean reward of the other responses as baseline."""

    Config = RLOOConfig
