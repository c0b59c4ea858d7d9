"""Advantages of REINFORCE++: returns per token, whitened over all loss tokens of the step."""

from __future__ import annotations

import torch

from rlcore.algorithms.kl import kl_estimate
from rlcore.algorithms.ppo import last_loss_tokens
from rlcore.data.batch import Batch
from rlcore.protocols.roles import Roles
from rlcore_algorithms.estimators import returns_to_go


def whitened_returns(roles: Roles, samples: Batch, *, gamma: float, kl: float, estimator: str) -> Batch:
    """Add the token column `advantages`; only sums per response reach the controller."""
    columns = ["loss_mask", "reward", *(["old_log_probs", "ref_log_probs"] if kl else [])]
    returns = roles.actor.apply(token_returns, samples.select(*columns), gamma=gamma, kl=kl, estimator=estimator)
    total, squares = returns.fetch("return_sum", "return_squares")
    count = max(1, int(samples.fetch("num_loss_tokens").sum()))
    mean = float(total.sum()) / count
    variance = max(0.0, float(squares.sum()) / count - mean**2)
    whole = samples.select("loss_mask") | returns.select("returns")
    samples |= roles.actor.apply(whiten, whole, mean=mean, std=(variance + 1e-8) ** 0.5)
    return samples


def token_returns(batch: Batch, *, gamma: float, kl: float, estimator: str) -> Batch:
    """Compute `returns` [T] of r_t = -kl · KL_t (+ the score at the last token), and their sums per row."""
    mask = batch["loss_mask"]
    rewards = torch.zeros(batch.num_tokens, dtype=torch.float64)
    if kl:
        estimate = kl_estimate(batch["old_log_probs"], batch["ref_log_probs"], estimator)  # type: ignore[arg-type]
        rewards -= kl * torch.where(mask, estimate, 0.0)
    rewards[last_loss_tokens(mask, batch.lengths)] += batch["reward"][batch.per_row(mask.float()) > 0]
    returns = returns_to_go(rewards, mask, batch.lengths, gamma)
    sums = {"return_sum": batch.per_row(returns), "return_squares": batch.per_row(returns**2)}
    return Batch.of(lengths=batch.lengths, tokens={"returns": returns}, rows=sums)


def whiten(batch: Batch, *, mean: float, std: float) -> Batch:
    """Compute the column `advantages`, [T] float32."""
    advantages = torch.where(batch["loss_mask"], (batch["returns"] - mean) / std, 0.0)
    return Batch.of(lengths=batch.lengths, tokens={"advantages": advantages.float()})
