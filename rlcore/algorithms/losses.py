"""Losses: pure functions that return one term per token; the core averages the terms.

Shapes: T tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlcore.algorithms.kl import kl_estimate


class PolicyLoss(NamedTuple):
    """Terms of the clipped policy loss, and metrics; all [T]."""

    terms: Tensor
    clipped: Tensor
    """1 where a clip is active, so that the token has no gradient, else 0."""
    kl: Tensor
    """k3 estimate of KL(old policy || new policy)."""


def clipped_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> PolicyLoss:
    """Return -min(ratio · A, clip(ratio, 1 - clip_low, 1 + clip_high) · A), with ratio = exp(log p - log p_old).

    PPO, arXiv 1707.06347, eq. 7; clip_high > clip_low is DAPO's clip-higher (arXiv 2503.14476). dual_clip > 1
    bounds the term of a negative advantage by -dual_clip · A (arXiv 1912.09729, eq. 5); 0 disables it.
    """
    ratio = torch.exp((log_probs - old_log_probs).clamp(-20.0, 20.0))
    plain = -ratio * advantages
    bounded = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    terms = torch.maximum(plain, bounded)
    clipped = bounded > plain
    if dual_clip:
        beyond = (advantages < 0) & (-dual_clip * advantages < terms)
        terms = torch.where(beyond, -dual_clip * advantages, terms)
        clipped |= beyond
    return PolicyLoss(terms, clipped.to(terms.dtype), kl_estimate(old_log_probs, log_probs, "k3"))


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> tuple[Tensor, Tensor]:
    """Return 0.5 · max((V - R)², (clip(V, V_old ± clip) - R)²), [T], and 1 where the clip is active, [T].

    clip=0 disables the clip.
    """
    plain = (values - returns) ** 2
    if not clip:
        return 0.5 * plain, torch.zeros_like(plain)
    near = old_values + (values - old_values).clamp(-clip, clip)
    bounded = (near - returns) ** 2
    return 0.5 * torch.maximum(plain, bounded), (bounded > plain).to(plain.dtype)
