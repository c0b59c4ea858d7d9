"""SAPO: soft adaptive policy optimization, arXiv 2511.20347.

    f(ratio) = sigmoid(tau · (ratio - 1)) · 4 / tau,   tau = tau_positive where A > 0, else tau_negative
    loss = mean over responses of the mean over tokens of  -f(ratio) · A

A smooth gate replaces the clip: at ratio 1 the gradient is the plain policy gradient, and it fades on both
sides. tau_negative > tau_positive makes it fade faster for bad responses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlcore.algorithms.kl import kl_estimate
from rlcore.data.batch import Batch
from rlcore.errors import require
from rlcore.types import Average
from rlcore_algorithms.family import Family, FamilyConfig, bounded_ratio, refuse_clip


@dataclass(frozen=True, slots=True, kw_only=True)
class SAPOConfig(FamilyConfig):
    """Settings of SAPO; the clip settings are refused."""

    average: Average = "seq-mean-token-mean"
    tau_positive: float = 1.0
    tau_negative: float = 1.05

    def __post_init__(self) -> None:
        FamilyConfig.__post_init__(self)
        require(self.tau_positive > 0, "tau_positive", "more than 0", self.tau_positive, 1.0)
        require(self.tau_negative > 0, "tau_negative", "more than 0", self.tau_negative, 1.05)
        refuse_clip(self, "sapo", "clip_low", "clip_high")


class SAPO(Family):
    """Policy gradient with a soft gate instead of the clip."""

    Config = SAPOConfig

    def policy_loss(self, log_probs: Tensor, old_log_probs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        ratio, advantages = bounded_ratio(log_probs, old_log_probs), self.advantages(batch)
        tau = torch.where(advantages > 0, self.config.tau_positive, self.config.tau_negative)
        gate = torch.sigmoid(tau * (ratio - 1.0))
        metrics = {"gate": (4.0 * gate * (1.0 - gate)).detach()}
        kl = kl_estimate(old_log_probs, log_probs.detach(), "k3")
        return -gate * 4.0 / tau * advantages, metrics | {"kl_to_old": kl}
