"""CISPO: clipped importance sampling of the gradient, MiniMax-M1, arXiv 2506.13585.

    loss = -mean over tokens of  stopgrad(clip(ratio, 1 - clip_low, 1 + clip_high)) · A · log p(token)

The clip bounds the weight and every token keeps a gradient. As in the paper, there is no lower bound by
default (`clip_low=1`); the paper gives no number for the upper one.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlcore.algorithms.kl import kl_estimate
from rlcore.data.batch import Batch
from rlcore_algorithms.family import Family, FamilyConfig, bounded_ratio, refuse_clip


@dataclass(frozen=True, slots=True, kw_only=True)
class CISPOConfig(FamilyConfig):
    """Settings of CISPO."""

    clip_low: float = 1.0
    clip_high: float = 0.28

    def __post_init__(self) -> None:
        FamilyConfig.__post_init__(self)
        refuse_clip(self, "cispo")


class CISPO(Family):
    """REINFORCE with a bounded weight."""

    Config = CISPOConfig

    def policy_loss(self, log_probs: Tensor, old_log_probs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = bounded_ratio(log_probs.detach(), old_log_probs)
        weight = ratio.clamp(1.0 - self.config.clip_low, 1.0 + self.config.clip_high)
        metrics = {"clip_fraction": (weight != ratio).to(ratio.dtype)}
        kl = kl_estimate(old_log_probs, log_probs.detach(), "k3")
        return -weight * self.advantages(batch) * log_probs, metrics | {"kl_to_old": kl}
