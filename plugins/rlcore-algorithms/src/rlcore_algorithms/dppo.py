"""DPPO: divergence proximal policy optimization, arXiv 2602.04879.

    loss = -mean over tokens of  m · ratio · A,   m = 0 where (ratio - 1) · A > 0 and D(token) > limit, else 1

The clip of PPO bounds the ratio, which is large for rare tokens and says little about common ones. Here D estimates the
divergence of the distributions from the token that was sampled (the paper's binary approximation):

    tv:  |p - p_old|
    kl:  p_old · log(p_old / p) + (1 - p_old) · log((1 - p_old) / (1 - p))

Departure: p_old is the trained policy before the update; `algorithm.correction` accounts for the engine's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rlcore.algorithms.kl import kl_estimate
from rlcore.data.batch import Batch
from rlcore.errors import require
from rlcore_algorithms.family import Family, FamilyConfig, bounded_ratio, refuse_clip

_CERTAIN = 1.0 - 1e-6
"""Largest probability in the divergence, which is infinite between 1 and less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DPPOConfig(FamilyConfig):
    """Settings of DPPO; the clip settings are refused."""

    divergence: Literal["tv", "kl"] = "tv"
    """Estimate of the divergence at each token: total variation or KL."""
    limit: float = 0.15
    """Tokens beyond this divergence get no gradient that increases it."""

    def __post_init__(self) -> None:
        FamilyConfig.__post_init__(self)
        require(self.limit > 0, "limit", "more than 0", self.limit, 0.15)
        refuse_clip(self, "dppo", "clip_low", "clip_high")


class DPPO(Family):
    """Policy gradient with a bound on the divergence instead of the ratio."""

    Config = DPPOConfig

    def policy_loss(self, log_probs: Tensor, old_log_probs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        advantages, ratio = self.advantages(batch), bounded_ratio(log_probs, old_log_probs)
        divergence = binary_divergence(log_probs.detach(), old_log_probs, self.config.divergence)
        masked = ((ratio.detach() - 1.0) * advantages > 0) & (divergence > self.config.limit)
        gain = ratio * advantages
        metrics = {"masked": masked.to(ratio.dtype), "divergence": divergence}
        kl = kl_estimate(old_log_probs, log_probs.detach(), "k3")
        return -torch.where(masked, gain.detach(), gain), metrics | {"kl_to_old": kl}


def binary_divergence(log_probs: Tensor, old_log_probs: Tensor, kind: Literal["tv", "kl"]) -> Tensor:
    """Return the divergence between two distributions over {the sampled token, any other}, [T]."""
    p, old = (it.exp().clamp(max=_CERTAIN) for it in (log_probs, old_log_probs))
    if kind == "tv":
        return (p - old).abs()
    return old * (old_log_probs - log_probs) + (1 - old) * (torch.log1p(-old) - torch.log1p(-p))
