"""ReMax: the greedy response as baseline, arXiv 2310.10505.

    A_i = r_i - reward of the greedy response to the same prompt

One sample per prompt is enough. A step then generates two responses per prompt; the greedy one is not part
of the experience and not counted as a sample.

Departures:
1. The loss is PPO's clipped loss, which has the paper's gradient in the first optimizer step on a sample.
2. If the greedy response has no score, the mean of the sampled ones is used (`experience/baseline_missing`).
"""

from __future__ import annotations

from dataclasses import dataclass

from rlcore_algorithms.family import Estimator, Family, FamilyConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ReMaxConfig(FamilyConfig):
    """Settings of ReMax."""

    estimator: Estimator = "remax"


class ReMax(Family):
    """Policy gradient with the reward of the greedy response as baseline."""

    Config = ReMaxConfig
