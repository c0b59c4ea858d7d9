"""Advantage estimators: pure functions from the rewards of responses to their advantages.

Every estimator takes `reward` [B], `group_id` [B] (shared by the samples of a prompt) and `length` [B]
(number of loss tokens), and returns [B] float64. Shapes: B rows, T tokens concatenated over all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise

import torch
from torch import Tensor

from rlcore.algorithms.advantages import group_mean, group_normalized, group_size, group_variance

Estimate = Callable[[Tensor, Tensor, Tensor], Tensor]


def normalized(reward: Tensor, group_id: Tensor, length: Tensor) -> Tensor:
    """Return (r - mean of the group) / its standard deviation: GRPO, arXiv 2402.03300."""
    return group_normalized(reward, group_id).double()


def centered(reward: Tensor, group_id: Tensor, length: Tensor) -> Tensor:
    """Return r - mean of the group: Dr. GRPO, arXiv 2503.20783."""
    return reward.double() - group_mean(reward.double(), group_id)


def step_centered(reward: Tensor, group_id: Tensor, length: Tensor) -> Tensor:
    """Return r - mean of all responses of the step: REINFORCE with a baseline."""
    return reward.double() - reward.double().mean() if len(reward) else reward.double()


def leave_one_out(reward: Tensor, group_id: Tensor, length: Tensor) -> Tensor:
    """Return r - mean of the other responses of the group, 0 if there are none: RLOO, arXiv 2402.14740."""
    size = group_size(group_id)
    return centered(reward, group_id, length) * size / (size - 1).clamp(min=1)


def length_weighted(reward: Tensor, group_id: Tensor, length: Tensor) -> Tensor:
    """Return r - Σ length · r / Σ length over the group: OPO, arXiv 2505.23585, eq. 9."""
    weight = length.double().clamp(min=1)
    baseline = group_mean(weight * reward.double(), group_id) / group_mean(weight, group_id)
    return reward.double() - baseline


def rescaled(reward: Tensor, group_id: Tensor, length: Tensor) -> Tensor:
    """Return α (r - mean of the group), α = responses / those in groups with variance: GPG, arXiv 2504.02546."""
    valid = int((group_variance(reward, group_id) > 0).sum())
    return centered(reward, group_id, length) * (len(reward) / max(1, valid))


def whitened_centered(reward: Tensor, group_id: Tensor, length: Tensor) -> Tensor:
    """Return r - mean of the group, whitened over the step's tokens: REINFORCE++-baseline, arXiv 2501.03262."""
    advantage, weight = centered(reward, group_id, length), length.double()
    total = weight.sum().clamp(min=1)
    mean = (weight * advantage).sum() / total
    variance = (weight * (advantage - mean) ** 2).sum() / total
    return (advantage - mean) / (variance + 1e-8).sqrt()


ROW_ESTIMATORS: Mapping[str, Estimate] = {
    "grpo": normalized,
    "dr_grpo": centered,
    "reinforce": step_centered,
    "rloo": leave_one_out,
    "opo": length_weighted,
    "gpg": rescaled,
    "reinforce_plus_plus_baseline": whitened_centered,
}


def returns_to_go(rewards: Tensor, loss_mask: Tensor, lengths: Tensor, gamma: float) -> Tensor:
    """Return G_t = r_t + gamma · G of the sample's next loss token, [T]; zero outside the mask."""
    returns = torch.zeros_like(rewards)
    offsets = [0, *lengths.cumsum(0).tolist()]
    for start, stop in pairwise(offsets):
        where = start + loss_mask[start:stop].nonzero().squeeze(1)
        if gamma == 1.0:
            returns[where] = rewards[where].flip(0).cumsum(0).flip(0)
            continue
        following = torch.zeros((), dtype=rewards.dtype)
        for t in reversed(where.tolist()):
            following = rewards[t] + gamma * following
            returns[t] = following
    return returns
