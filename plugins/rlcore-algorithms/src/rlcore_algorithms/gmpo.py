"""GMPO: geometric-mean policy optimization, arXiv 2507.20673.

    c_t = log p - log p_old, at most clip_high where A > 0, at least -clip_low where A < 0
    loss = mean over responses of  -A_i · exp(mean over tokens of c_t)

The geometric mean of the ratios is less sensitive to outliers than the arithmetic one. The clip applies to
each token's log-ratio and is wide: exp(±0.4). Terms are returned per token with their gradient, as in
gspo.py; a clipped token has none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlcore.algorithms.kl import kl_estimate
from rlcore.data.batch import Batch
from rlcore.types import Average
from rlcore_algorithms.family import Family, FamilyConfig, refuse_clip, refuse_token_advantages
from rlcore_algorithms.gspo import carried, refuse_other_average, response_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class GMPOConfig(FamilyConfig):
    """Settings of GMPO; the clip bounds apply to log-ratios."""

    average: Average = "seq-mean-token-mean"
    clip_low: float = 0.4
    clip_high: float = 0.4

    def __post_init__(self) -> None:
        FamilyConfig.__post_init__(self)
        refuse_token_advantages(self, "gmpo")
        refuse_other_average(self, "gmpo")
        refuse_clip(self, "gmpo")


class GMPO(Family):
    """Policy gradient with the geometric mean of a response's ratios."""

    Config = GMPOConfig

    def policy_loss(self, log_probs: Tensor, old_log_probs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        d, advantages = (log_probs - old_log_probs).clamp(-20.0, 20.0), self.advantages(batch)
        upper = d.clamp(max=self.config.clip_high)
        lower = d.clamp(min=-self.config.clip_low)
        c = torch.where(advantages > 0, upper, torch.where(advantages < 0, lower, d))
        ratio = carried(response_mean(c.detach(), batch).exp(), c)
        metrics = {"clip_fraction": (c != d).to(d.dtype), "ratio": ratio.detach()}
        return -ratio * advantages, metrics | {"kl_to_old": kl_estimate(old_log_probs, log_probs.detach(), "k3")}
