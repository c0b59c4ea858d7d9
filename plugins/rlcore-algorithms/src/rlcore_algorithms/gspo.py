"""GSPO: group sequence policy optimization, arXiv 2507.18071.

    s_i = (p(response) / p_old(response)) ^ (1 / length) = exp(mean over tokens of log p - log p_old)
    loss = mean over responses of  -min(s_i · A_i, clip(s_i, 1 - clip_low, 1 + clip_high) · A_i)

Each response has one ratio, which is clipped as a whole; the bounds are of the order 1e-4. The term of a
token has the value of the ratio and the gradient of the token, s_i · exp(log p - stopgrad(log p)), so the
mean over each response, and then over responses, is the loss above. Any other `average` would be a different
loss and is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlcore.algorithms.correction import spread
from rlcore.algorithms.kl import kl_estimate
from rlcore.data.batch import Batch
from rlcore.errors import require
from rlcore.types import Average
from rlcore_algorithms.family import Family, FamilyConfig, refuse_clip, refuse_token_advantages


@dataclass(frozen=True, slots=True, kw_only=True)
class GSPOConfig(FamilyConfig):
    """Settings of GSPO."""

    average: Average = "seq-mean-token-mean"
    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def __post_init__(self) -> None:
        FamilyConfig.__post_init__(self)
        refuse_token_advantages(self, "gspo")
        refuse_other_average(self, "gspo")
        refuse_clip(self, "gspo")


class GSPO(Family):
    """Policy gradient with one ratio per response."""

    Config = GSPOConfig

    def policy_loss(self, log_probs: Tensor, old_log_probs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        d = (log_probs - old_log_probs).clamp(-20.0, 20.0)
        ratio = carried(response_mean(d.detach(), batch).exp(), log_probs)
        advantages = self.advantages(batch)
        plain = -ratio * advantages
        bounded = -ratio.clamp(1.0 - self.config.clip_low, 1.0 + self.config.clip_high) * advantages
        metrics = {"clip_fraction": (bounded > plain).to(plain.dtype), "ratio": ratio.detach()}
        kl = kl_estimate(old_log_probs, log_probs.detach(), "k3")
        return torch.maximum(plain, bounded), metrics | {"kl_to_old": kl}


def response_mean(values: Tensor, batch: Batch) -> Tensor:
    """Average [T] values over the loss tokens of each response, and repeat the mean for its tokens, [T]."""
    mask = batch["loss_mask"]
    sums = batch.per_row(torch.where(mask, values, 0.0))
    return spread(sums / batch.per_row(mask.to(values.dtype)).clamp(min=1), batch)


def carried(value: Tensor, gradient: Tensor) -> Tensor:
    """Return `value`, [T], with the gradient value · d gradient."""
    return value.detach() * torch.exp(gradient - gradient.detach())


def refuse_other_average(config: FamilyConfig, name: str) -> None:
    """Refuse other averages; called by losses that are by definition a mean over responses."""
    expected = f"seq-mean-token-mean, because {name} has one term per response"
    require(config.average == "seq-mean-token-mean", "average", expected, config.average, "seq-mean-token-mean")
