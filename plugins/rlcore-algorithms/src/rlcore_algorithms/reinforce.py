"""REINFORCE with a baseline, Williams 1992, https://doi.org/10.1007/BF00992696.

    A_i = r_i - mean of r over all responses of the step;   loss = -mean over tokens of  A_i · log p(token)

Departures:
1. The gradient is taken through PPO's clipped ratio, which is the same in the first optimizer step on a
   sample and bounded in later ones.
2. The baseline includes the response's own reward, which scales the gradient by 1 - 1/n for n responses.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlcore_algorithms.family import Estimator, Family, FamilyConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ReinforceConfig(FamilyConfig):
    """Settings of REINFORCE."""

    estimator: Estimator = "reinforce"


class Reinforce(Family):
    """Policy gradient with the mean reward of the step as baseline."""

    Config = ReinforceConfig
