"""Advantages with the optimal token baseline (see optimal_token_baseline.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from rlcore.data.batch import Batch
from rlcore.data.shares import UNIT
from rlcore.protocols.roles import Roles
from rlcore.workers.policy import PolicyWorker

_EPSILON = 1e-8
"""Added to each weight: where all are 0, the baseline is the mean."""


def baseline_advantages(roles: Roles, samples: Batch, reward: Tensor) -> Batch:
    """Add the token column `advantages`, given the reward of each response, [B]; groups are compared next to the data.

    At half the temperature, p(token) is p(token)² / Σ p², so one more forward pass gives Σ p² exactly.
    """
    half = roles.group("actor", PolicyWorker).log_probs(samples, 0.5).rename(log_probs="half_log_probs")
    columns = samples.select("loss_mask", "old_log_probs") | half.select("half_log_probs")
    group_id = samples.fetch("group_id")
    order = group_id.argsort(stable=True)
    grouped = columns.with_rows(**{UNIT: group_id, "return": reward.double()}).take(order)
    found = roles.actor.apply(token_advantages, grouped).take(order.argsort())
    return samples | found


def token_advantages(batch: Batch) -> Batch:
    """Compute `advantages`, [T] float32, zero outside the mask; the rows of a group are a unit."""
    mask, sizes = batch["loss_mask"], torch.from_numpy(batch.unit_sizes())
    row = torch.arange(len(batch)).repeat_interleave(batch.lengths)[mask]
    counts = row.bincount(minlength=len(batch))
    start = (counts.cumsum(0) - counts)[row]
    place = torch.arange(len(row)) - start
    weight = path_weight(batch["old_log_probs"][mask], batch["half_log_probs"][mask], start) + _EPSILON
    longest = int(counts.max()) if len(counts) else 0
    here = torch.arange(len(sizes)).repeat_interleave(sizes)[row] * longest + place  # the group's t-th tokens
    returns = batch["return"][row]
    total, weighted = (
        torch.zeros(len(sizes) * longest, dtype=torch.float64).index_add_(0, here, it)
        for it in (weight, weight * returns)
    )
    advantages = torch.zeros(batch.num_tokens)
    advantages[mask] = (returns - weighted[here] / total[here]).float()
    return Batch.of(lengths=batch.lengths, tokens={"advantages": advantages})


def path_weight(log_probs: Tensor, half_log_probs: Tensor, start: Tensor) -> Tensor:
    """Return W of n loss tokens, [n] float64, given the place at which the response of each begins, [n] int64."""
    log_probs, half_log_probs = log_probs.double(), half_log_probs.double()
    squares = (2 * log_probs - half_log_probs).exp()
    weight = (1 - 2 * log_probs.exp() + squares).clamp(min=0)
    total = weight.cumsum(0)
    path: Tensor = total - (total - weight)[start]
    return path
