"""Off-policy correction for the mismatch between the policy that sampled (q) and the policy before the update (p).

They differ because engine and trainer compute differently, and because older weights sampled (`schedule`). The log-ratio
is d_t = log p(token t) - log q(token t):

    token      w_t = exp(d_t)                      sequence   w_t = exp(Σ d over the response), for all its tokens
    truncate   min(max(w, low), high)              mask       w where low <= w <= high, else 0

`token` + `truncate` is TIS (fengyao.notion.site, "Your efficient RL framework secretly brings you off-policy
RL training", 2025), `mask` with low 0 is MIS, `mask` with two thresholds is the band of IcePop (arXiv
2510.18855). The ratio that PPO clips is against p, so `token` is decoupled PPO (arXiv 2505.24298, section 5.2):

    loss = -w_t · min(u_t · A, clip(u_t, 1 - clip_low, 1 + clip_high) · A),   u_t = exp(log p_new - log p)

A response whose divergence is above `reject_above` is rejected, that is, all its weights are 0:

    mean_k1 = |mean of d|      mean_k3 = mean of exp(d) - 1 - d      max_k3 = the largest exp(d) - 1 - d

k3 estimates KL(q || p) from tokens sampled from q (Schulman, "Approximating KL divergence", 2020).

Weights carry no gradient and multiply the policy's terms, not the entropy bonus or the KL penalty.

Departures:
1. A token with weight 0 still counts in the mean, so the gradient does not depend on how a batch is split.
2. Weights are not normalized over the batch, for the same reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rlcore.algorithms.kl import kl_estimate
from rlcore.data.batch import Batch
from rlcore.errors import require
from rlcore.types import Mean, Metrics

_MAX_LOG_RATIO = 20.0
_SQUARED = "correction/weight_squared"


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionConfig:
    """Settings of the importance weights; no correction by default."""

    weight: Literal["none", "token", "sequence"] = "none"
    """Importance weight of each token, or of each response for all its tokens."""
    beyond: Literal["truncate", "mask"] = "truncate"
    """Treatment of a weight below `low` or above `high`: set it to the bound, or to 0."""
    low: float = 0.0
    """Smallest weight."""
    high: float = 2.0
    """Largest weight."""
    reject: Literal["none", "mean_k1", "mean_k3", "max_k3"] = "none"
    """Divergence by which whole responses are rejected."""
    reject_above: float = 0.1
    """Largest divergence of a response that is kept, in nats."""

    def __post_init__(self) -> None:
        require(self.low >= 0, "low", "0 or more", self.low, 0.5)
        require(self.high > self.low, "high", f"more than low={self.low}", self.high, 2.0)
        require(self.reject_above > 0, "reject_above", "more than 0", self.reject_above, 0.1)
        for chosen, ignored in (("weight", ("beyond", "low", "high")), ("reject", ("reject_above",))):
            for name in ignored if getattr(self, chosen) == "none" else ():
                value, default = getattr(self, name), type(self).__dataclass_fields__[name].default
                require(value == default, name, f"{default}, because {chosen}=none ignores it", value, default)

    @property
    def active(self) -> bool:
        """True if terms are weighted or rejected."""
        return self.weight != "none" or self.reject != "none"


def correct(
    terms: Tensor, old_log_probs: Tensor, batch: Batch, config: CorrectionConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the weighted terms, [T], and metrics; without a correction, the terms and no metrics."""
    if not config.active:
        return terms, {}
    mask = batch["loss_mask"]
    d = torch.where(mask, old_log_probs - batch["rollout_log_probs"], 0.0).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    k3 = kl_estimate(torch.zeros_like(d), d, "k3")
    weights, outside = bounded(log_weights(d, batch, config.weight), config)
    metrics = {"correction/k3": k3, "correction/outside": outside.to(terms.dtype)}
    if config.reject != "none":
        rejected = divergence(d, k3, batch, config.reject) > config.reject_above
        weights = torch.where(spread(rejected, batch), 0.0, weights)
        metrics["correction/rejected"] = rejected.to(terms.dtype)
    return terms * weights, metrics | {"correction/weight": weights, _SQUARED: weights**2}


def with_effective_size(metrics: Metrics) -> Metrics:
    """Replace mean squared weights by the effective sample size as a fraction of the tokens, (Σ w)² / (T · Σ w²)."""
    found = dict(metrics)
    for name in [it for it in metrics if it.endswith(_SQUARED)]:
        squared, weight = found.pop(name), metrics[name.removesuffix("_squared")]
        size = weight.value**2 / squared.value if squared.total else 0.0
        found[name.replace("weight_squared", "effective_size")] = Mean(size)
    return found


def log_weights(d: Tensor, batch: Batch, weight: str) -> Tensor:
    """Return the log-weights, [T], bounded only so that exp() stays finite."""
    if weight == "none":
        return torch.zeros_like(d)
    return d if weight == "token" else spread(batch.per_row(d), batch).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def bounded(log_weights: Tensor, config: CorrectionConfig) -> tuple[Tensor, Tensor]:
    """Return the bounded weights, [T], and a mask of those that were out of bounds."""
    weights = log_weights.exp()
    if config.weight == "none":
        return weights, torch.zeros_like(weights, dtype=torch.bool)
    outside = (weights < config.low) | (weights > config.high)
    if config.beyond == "mask":
        return torch.where(outside, 0.0, weights), outside
    return weights.clamp(config.low, config.high), outside


def divergence(d: Tensor, k3: Tensor, batch: Batch, name: str) -> Tensor:
    """Return the divergence between engine and trainer on each response, [B]."""
    count = batch.per_row(batch["loss_mask"].to(d.dtype)).clamp(min=1)
    if name == "mean_k1":
        return (batch.per_row(d) / count).abs()
    if name == "mean_k3":
        return batch.per_row(k3) / count
    row = torch.arange(len(batch), device=d.device).repeat_interleave(batch.lengths.to(d.device))
    return torch.zeros(len(batch), dtype=d.dtype, device=d.device).scatter_reduce(0, row, k3, "amax")


def spread(values: Tensor, batch: Batch) -> Tensor:
    """Repeat the value of each row, [B], for each of its tokens, [T]."""
    return values.repeat_interleave(batch.lengths.to(values.device), output_size=batch.num_tokens)
