"""ReMax: arXiv 2310.10505.

    A_i = r_i - reward of the greedy response to the same prompt

Works with one sample for each prompt; a step then draws two responses for each, of which the greedy one is no
experience and not counted among the samples.

Departures:
1. The loss is the clipped one of PPO, which has the paper's gradient in the first optimiser step on a sample.
2. Where the greedy response has no score, the mean of the sampled ones stands in (`experience/baseline_missing`).
"""

from __future__ import annotations

from dataclasses import dataclass

from rlcore_algorithms.family import Estimator, Family, FamilyConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ReMaxConfig(FamilyConfig):
    """Settings of ReMax."""

    estimator: Estimator = "remax"


class ReMax(Family):
    """Better than the greedy response."""

    Config = ReMaxConfig
