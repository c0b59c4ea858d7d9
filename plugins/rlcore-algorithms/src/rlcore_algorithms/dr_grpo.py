"""Dr. GRPO: GRPO done right, arXiv 2503.20783.

    A_i = r_i - mean of its group;   loss = 1/rows · Σ over responses Σ over tokens of the clipped loss of PPO

GRPO without the division by the standard deviation, which favors prompts that are too easy or too hard, and
by the length, which favors long wrong responses. Departure: the paper's code divides the sum by the token
limit, a constant; here it is omitted, so `optimizer.clip_grad_norm` sees a larger gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlcore.types import Average
from rlcore_algorithms.family import Estimator, Family, FamilyConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DrGRPOConfig(FamilyConfig):
    """Settings of Dr. GRPO."""

    estimator: Estimator = "dr_grpo"
    average: Average = "seq-mean-token-sum"


class DrGRPO(Family):
    """GRPO without its two divisions."""

    Config = DrGRPOConfig
