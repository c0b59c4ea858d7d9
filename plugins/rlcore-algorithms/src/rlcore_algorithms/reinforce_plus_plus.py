"""REINFORCE++ and its variant with a group baseline, arXiv 2501.03262.

    r_t = -beta · KL_t  (+ the score at the last token);   G_t = r_t + gamma · G_{t+1}
    A_t = (G_t - mean) / std over all loss tokens of the step;   loss as in PPO, no critic

reinforce_plus_plus_baseline:  A_i = whiten(r_i - mean of its group), the same for every token of response i; its KL
penalty is in the loss, with k2.

Departures:
1. Whitening is over the step, not the mini-batch, and uses the population standard deviation.
2. The penalty is off until `kl.coefficient` is set.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rlcore.algorithms.kl import KLConfig
from rlcore_algorithms.family import Estimator, Family, FamilyConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ReinforcePlusPlusConfig(FamilyConfig):
    """Settings of REINFORCE++."""

    estimator: Estimator = "reinforce_plus_plus"
    kl: KLConfig = field(default_factory=lambda: KLConfig(where="reward", estimator="k1"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReinforcePlusPlusBaselineConfig(FamilyConfig):
    """Settings of REINFORCE++-baseline."""

    estimator: Estimator = "reinforce_plus_plus_baseline"
    kl: KLConfig = field(default_factory=lambda: KLConfig(where="loss", estimator="k2"))


class ReinforcePlusPlus(Family):
    """Policy gradient with returns per token, whitened over the step."""

    Config = ReinforcePlusPlusConfig


class ReinforcePlusPlusBaseline(Family):
    """Policy gradient with rewards centered on the group and whitened over the step."""

    Config = ReinforcePlusPlusBaselineConfig
