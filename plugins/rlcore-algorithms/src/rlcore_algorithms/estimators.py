"""Advantages of whole responses: pure functions from rewards to how much better than expected a response was.

Every function takes `reward` [B], `group_id` [B] (samples of one prompt share it) and `length` [B] (loss tokens), and
returns [B] float64. Shapes: B rows, T tokens laid end to end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise

import torch
from torch import Tensor

from rlcore.algorithms.advantages import group_mean, group_normalised, group_size, group_variance

Estimate = Callable[[Tensor, Tensor, Tensor], Tensor]


def normalised(reward: Tensor, group_id: Tensor, length: Tensor) -> Tensor:
    """(r - mean of the group) / its standard deviation: GRPO, arXiv 2402.03300."""
    return group_normalised(reward, group_id).double()


def centred(reward: Tensor, group_id: Tensor, length: Tensor) -> Tensor:
    """r - mean of the group: Dr. GRPO, arXiv 2503.20783."""
    return reward.double() - group_mean(reward.double(), group_id)


def step_centred(reward: Tensor, group_id: Tensor, length: Tensor) -> Tensor:
    """r - mean of all responses of the step: REINFORCE with a baseline."""
    return reward.double() - reward.double().mean() if len(reward) else reward.double()


def leave_one_out(reward: Tensor, group_id: Tensor, length: Tensor) -> Tensor:
    """r - mean of the others of the group: RLOO, arXiv 2402.14740. A group of one has nothing to compare with: 0."""
    size = group_size(group_id)
    return centred(reward, group_id, length) * size / (size - 1).clamp(min=1)


def length_weighted(reward: Tensor, group_id: Tensor, length: Tensor) -> Tensor:
    """r - Σ length · r / Σ length over the group: OPO, arXiv 2505.23585, eq. 9."""
    weight = length.double().clamp(min=1)
    baseline = group_mean(weight * reward.double(), group_id) / group_mean(weight, group_id)
    return reward.double() - baseline


def rescaled(reward: Tensor, group_id: Tensor, length: Tensor) -> Tensor:
    """α (r - mean of the group), α = responses / responses of groups that differ: GPG, arXiv 2504.02546."""
    valid = int((group_variance(reward, group_id) > 0).sum())
    return centred(reward, group_id, length) * (len(reward) / max(1, valid))


def whitened_centred(reward: Tensor, group_id: Tensor, length: Tensor) -> Tensor:
    """r - mean of the group, then whitened over the tokens of the step: REINFORCE++-baseline, arXiv 2501.03262."""
    advantage, weight = centred(reward, group_id, length), length.double()
    total = weight.sum().clamp(min=1)
    mean = (weight * advantage).sum() / total
    variance = (weight * (advantage - mean) ** 2).sum() / total
    return (advantage - mean) / (variance + 1e-8).sqrt()


ROW_ESTIMATORS: Mapping[str, Estimate] = {
    "grpo": normalised,
    "dr_grpo": centred,
    "reinforce": step_centred,
    "rloo": leave_one_out,
    "opo": length_weighted,
    "gpg": rescaled,
    "reinforce_plus_plus_baseline": whitened_centred,
}


def returns_to_go(rewards: Tensor, loss_mask: Tensor, lengths: Tensor, gamma: float) -> Tensor:
    """[T] G_t = r_t + gamma · G of the sample's next loss token; zero outside the mask."""
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
