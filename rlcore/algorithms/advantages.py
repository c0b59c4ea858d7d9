"""Advantage estimators: pure functions from rewards to advantages of responses or tokens.

Shapes: B rows, T tokens concatenated over all rows.
"""

from __future__ import annotations

import torch
from torch import Tensor


def group_mean(values: Tensor, group_id: Tensor) -> Tensor:
    """Return the mean of each row's group, [B]; rows of a group need not be adjacent."""
    _, group = torch.unique(group_id, return_inverse=True)
    sums = torch.zeros(int(group.max()) + 1 if len(group) else 0, dtype=values.dtype).index_add_(0, group, values)
    means: Tensor = sums / group.bincount(minlength=len(sums))
    return means[group]


def group_variance(values: Tensor, group_id: Tensor) -> Tensor:
    """Return the population variance of each row's group, [B] float64."""
    values = values.double()  # so that the mean of equal float32 numbers is exactly that number
    return group_mean((values - group_mean(values, group_id)) ** 2, group_id)


def group_normalized(reward: Tensor, group_id: Tensor, *, by_std: bool = True, eps: float = 1e-6) -> Tensor:
    """Return A_i = (r_i - mean of its group) / (std of its group + eps), [B] float32.

    GRPO, arXiv 2402.03300, section 4.1.2, with the sample standard deviation (n - 1) used by its reference
    implementations. A group of one has nothing to compare with and gets advantage 0. by_std=False omits the
    division (Dr. GRPO, arXiv 2503.20783).
    """
    reward = reward.double()
    centered = reward - group_mean(reward, group_id)
    if by_std:
        size = group_size(group_id)
        unbiased = group_variance(reward, group_id) * size / (size - 1).clamp(min=1)
        centered = centered / (unbiased.sqrt() + eps)
    return centered.float()


def gae(
    rewards: Tensor, values: Tensor, loss_mask: Tensor, lengths: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Compute generalized advantage estimates over the loss tokens of each sample.

    arXiv 1506.02438, eq. 11 and 16: delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1};
    returns = A + V. The state after a loss token is that of the sample's next loss token; after the last one the
    value is 0.

    Args:
        rewards, values: [T] floating point; only loss tokens count.
        loss_mask: [T] bool.
        lengths: [B] number of tokens in each sample.

    Returns:
        Advantages and returns, [T] each, zero outside the mask.
    """
    row = torch.arange(len(lengths)).repeat_interleave(lengths)[loss_mask]
    counts = torch.bincount(row, minlength=len(lengths))
    longest = int(counts.max()) if len(counts) else 0
    place = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
    table_r = torch.zeros(len(lengths), longest + 1, dtype=rewards.dtype)
    table_v = torch.zeros(len(lengths), longest + 1, dtype=values.dtype)
    table_r[row, place] = rewards[loss_mask]
    table_v[row, place] = values[loss_mask]
    delta = table_r[:, :longest] + gamma * table_v[:, 1:] - table_v[:, :longest]
    table_a = torch.zeros_like(table_r)
    for t in reversed(range(longest)):
        table_a[:, t] = delta[:, t] + gamma * lam * table_a[:, t + 1]
    advantages = torch.zeros_like(rewards)
    advantages[loss_mask] = table_a[row, place]
    returns = torch.zeros_like(values)
    returns[loss_mask] = table_a[row, place] + table_v[row, place]
    return advantages, returns


def group_size(group_id: Tensor) -> Tensor:
    """Return the number of samples in each row's group, [B] float64."""
    _, group, counts = torch.unique(group_id, return_inverse=True, return_counts=True)
    sizes: Tensor = counts[group].double()
    return sizes
