"""Selection of a step's tokens by their covariance (see covariance.py).

Called on the controller, which receives sums and counts per response; token columns stay in the workers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlcore.data.batch import Batch
from rlcore.data.loader import mix
from rlcore.protocols.roles import Roles

_PARTS, _ROUNDS = 32, 3
"""Parts into which the range of cov is divided in each of three rounds: 32, which gives 1/32768 of the range."""


def choose_at_random(
    roles: Roles, samples: Batch, advantage: str, share: float, bounds: tuple[float, float], seed: int
) -> Batch:
    """Add the token column `chosen`: a random share of all loss tokens, from those with cov in `bounds`."""
    columns, options = _prepared(roles, samples, advantage)
    counted = roles.actor.apply(count_between, columns, bounds=bounds, **options)
    eligible = int(counted.fetch("count").sum())
    probability = min(1.0, share * int(samples.fetch("num_loss_tokens").sum()) / max(1, eligible))
    options |= {"bounds": bounds, "probability": probability, "seed": seed}
    marked = roles.actor.apply(mark_between, columns, **options)
    return samples | marked


def choose_largest(roles: Roles, samples: Batch, advantage: str, share: float) -> Batch:
    """Add the token column `chosen`: the share of all loss tokens with the largest cov, at least one token.

    No token is chosen when all have the same cov, as in a step whose rewards are all equal.
    """
    columns, options = _prepared(roles, samples, advantage)
    wanted = max(1, int(share * int(samples.fetch("num_loss_tokens").sum())))
    extremes = roles.actor.apply(extreme, columns, **options)
    low, high = (extremes.fetch(name) for name in ("smallest", "largest"))
    lowest, highest = (float(low.min()), float(high.max())) if len(samples) else (0.0, 0.0)
    if highest == lowest:
        lowest = torch.inf
    for _ in range(_ROUNDS if highest > lowest else 0):
        edges = torch.linspace(lowest, highest, _PARTS + 1, dtype=torch.float64).tolist()
        above = roles.actor.apply(count_above, columns, edges=edges, **options).fetch("count").sum(0).tolist()
        part = max(i for i, count in enumerate(above) if count >= wanted or i == 0)
        lowest, highest = edges[part], edges[min(part + 1, _PARTS)]
    marked = roles.actor.apply(mark_above, columns, threshold=lowest, **options)
    return samples | marked


def _prepared(roles: Roles, samples: Batch, advantage: str) -> tuple[Batch, dict[str, Any]]:
    """Return the columns and options of the functions below, including the means over the step."""
    columns = samples.select("loss_mask", "old_log_probs", "sample_id", advantage)
    sums = roles.actor.apply(sums_of, columns, advantage=advantage)
    count = max(1, int(samples.fetch("num_loss_tokens").sum()))
    means = tuple(float(sums.fetch(name).sum()) / count for name in ("log_prob_sum", "advantage_sum"))
    return columns, {"advantage": advantage, "means": means}


def covariance(batch: Batch, advantage: str, means: tuple[float, float]) -> Tensor:
    """Return cov of each token, [T] float64."""
    log_prob, mean = means
    centered: Tensor = batch["old_log_probs"].double() - log_prob
    return centered * (batch.per_token(advantage).double() - mean)


def sums_of(batch: Batch, *, advantage: str) -> Batch:
    """Sum log-probs and advantages over the loss tokens of each row."""
    mask = batch["loss_mask"]
    columns = {"log_prob_sum": batch["old_log_probs"], "advantage_sum": batch.per_token(advantage)}
    rows = {name: batch.per_row(torch.where(mask, column.double(), 0.0)) for name, column in columns.items()}
    return Batch.of(lengths=batch.lengths, rows=rows)


def extreme(batch: Batch, *, advantage: str, means: tuple[float, float]) -> Batch:
    """Find the smallest and the largest cov of each row."""
    cov, mask = covariance(batch, advantage, means), batch["loss_mask"]
    row = torch.arange(len(batch)).repeat_interleave(batch.lengths)[mask]
    found = {
        name: torch.zeros(len(batch), dtype=cov.dtype).scatter_reduce(0, row, cov[mask], how, include_self=False)
        for name, how in (("smallest", "amin"), ("largest", "amax"))
    }
    return Batch.of(lengths=batch.lengths, rows=found)


def count_above(batch: Batch, *, advantage: str, means: tuple[float, float], edges: list[float]) -> Batch:
    """Count the loss tokens of each row whose cov is at least each edge: [B, edges]."""
    reached = covariance(batch, advantage, means)[:, None] >= torch.tensor(edges, dtype=torch.float64)
    reached &= batch["loss_mask"][:, None]
    counts = torch.stack([batch.per_row(column.long()) for column in reached.unbind(1)], dim=1)
    return Batch.of(lengths=batch.lengths, rows={"count": counts})


def mark_above(batch: Batch, *, advantage: str, means: tuple[float, float], threshold: float) -> Batch:
    chosen = (covariance(batch, advantage, means) >= threshold) & batch["loss_mask"]
    return Batch.of(lengths=batch.lengths, tokens={"chosen": chosen})


def count_between(batch: Batch, *, advantage: str, means: tuple[float, float], bounds: tuple[float, float]) -> Batch:
    """Count the loss tokens of each row with a cov within `bounds`."""
    inside = _between(batch, advantage, means, bounds)
    return Batch.of(lengths=batch.lengths, rows={"count": batch.per_row(inside.long())})


def mark_between(
    batch: Batch,
    *,
    advantage: str,
    means: tuple[float, float],
    bounds: tuple[float, float],
    probability: float,
    seed: int,
) -> Batch:
    chosen = _between(batch, advantage, means, bounds) & (_uniform(batch, seed) < probability)
    return Batch.of(lengths=batch.lengths, tokens={"chosen": chosen})


def _between(batch: Batch, advantage: str, means: tuple[float, float], bounds: tuple[float, float]) -> Tensor:
    cov = covariance(batch, advantage, means)
    inside: Tensor = (cov >= bounds[0]) & (cov <= bounds[1]) & batch["loss_mask"]
    return inside


def _uniform(batch: Batch, seed: int) -> Tensor:
    """Return random numbers in [0, 1), [T], that depend only on sample id, token position and seed."""
    parts = [
        torch.rand(length, generator=torch.Generator().manual_seed(mix(seed, sample)), dtype=torch.float64)
        for sample, length in zip(batch["sample_id"].tolist(), batch.lengths.tolist())
    ]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)
