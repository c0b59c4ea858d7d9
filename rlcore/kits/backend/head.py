"""Log-probability and entropy of tokens from hidden states, forward and backward, without the logits of all tokens.

The logits z = h Wᵀ (+ b) exist for one chunk of tokens at a time, in float32. With more than one chunk, the backward
pass recomputes the logits of each chunk. The gradient of W is accumulated in float32. With p = softmax(z / t), its
normalizer lse = log Σ exp(z / t) and its entropy H:

    log p(y) = z_y / t - lse                 H = lse - Σ p · z / t
    d log p(y) / dz = (onehot(y) - p) / t    dH / dz = -p · (log p + H) / t

The vocabulary may be split over devices, which exchange four numbers per token instead of logits. Shapes: n tokens, V
vocabulary, v rows of it on this device (v = V if it is not split), D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.models.head import LogitRule

_CHUNK_VALUES = 2**25
"""Number of logits in one chunk: 128 MB in float32."""
_LOWEST = torch.finfo(torch.float32).min
_LOWEST_LOG_PROB = -1e4
"""Limit for log p, whose p is 0, so that products with it stay finite."""


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of the vocabulary on one of several devices, in order of their ranks; all devices have equally many."""

    group: dist.ProcessGroup
    vocabulary: int
    """Number of rows on all devices; those beyond are padding and have zero probability."""


def token_statistics(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    bias: Tensor | None = None,
    rule: LogitRule | None = None,
    part: Part | None = None,
    chunk: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return the log-probability [n] of `targets` and the entropy [n] in nats, float32, the same on all devices.

    Args:
        hidden: [n, D] hidden states.
        weight: [v, D] output embedding, or this device's part of it.
        bias: [v].
        rule: scaling and soft cap of the logits.
        part: describes `weight` if the vocabulary is split.
        chunk: number of tokens in a chunk; 0 derives it from the size of the vocabulary.
    """
    chunk = chunk or max(1, _CHUNK_VALUES // len(weight))
    statistics: Any = _TokenStatistics
    result: tuple[Tensor, Tensor] = statistics.apply(
        hidden, weight, bias, targets, temperature, rule or LogitRule(), part, chunk
    )
    return result


class _TokenStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        rule: LogitRule,
        part: Part | None,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        log_probs, entropy, normalizer = (hidden.new_empty(len(targets), dtype=torch.float32) for _ in range(3))
        kept = None
        for at in _chunks(len(targets), chunk):
            logits = _logits(hidden[at], weight, bias, rule, part)
            kept = logits if len(targets) <= chunk else None
            scaled = _divided(logits, temperature, keep=kept is not None)
            highest = scaled.amax(-1)
            _reduce(highest, part, dist.ReduceOp.MAX)
            row, is_here = _own_rows(targets[at], len(weight), part)
            chosen = scaled.gather(-1, row[:, None]).squeeze(-1).masked_fill(~is_here, 0.0)
            p = (scaled - highest[:, None]).exp_()
            total = p.sum(-1)
            # a logit of -inf has p = 0 and must not contribute to the mean of the logits
            sums = torch.stack([total, p.mul_(scaled.clamp_(min=_LOWEST)).sum(-1), chosen])
            _reduce(sums, part)
            normalizer[at] = highest + sums[0].log()
            log_probs[at] = sums[2] - normalizer[at]
            entropy[at] = normalizer[at] - sums[1] / sums[0]
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer, entropy, kept)
        ctx.options = temperature, rule, part, chunk
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        of_log_probs, of_entropy = gradients
        hidden, weight, bias, targets, normalizer, entropy, kept = ctx.saved_tensors
        temperature, rule, part, chunk = ctx.options
        to_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        to_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        to_bias = torch.zeros_like(bias, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        for at in _chunks(len(targets), chunk):
            logits = _logits(hidden[at], weight, bias, rule, part) if kept is None else kept
            slope = rule.slope(logits)
            log_p = _divided(logits, temperature, keep=kept is not None) - normalizer[at, None]
            log_p.clamp_(min=_LOWEST_LOG_PROB)
            row, is_here = _own_rows(targets[at], len(weight), part)
            of_chosen, of_spread = of_log_probs[at, None], of_entropy[at, None]
            raw = log_p.exp().neg_()
            raw.mul_(log_p.add_(entropy[at, None]).mul_(of_spread).add_(of_chosen))
            raw.scatter_add_(-1, row[:, None], of_chosen * is_here[:, None])
            raw = raw.mul_(slope / temperature).to(weight.dtype)
            if to_hidden is not None:
                to_hidden[at] = (raw @ weight).to(hidden.dtype)
            if to_weight is not None:
                to_weight += (raw.t() @ hidden[at].to(weight.dtype)).float()
            if to_bias is not None:
                to_bias += raw.float().sum(0)
        if to_hidden is not None:
            _reduce(to_hidden, part)
        cast_weight = None if to_weight is None else to_weight.to(weight.dtype)
        cast_bias = None if to_bias is None else to_bias.to(bias.dtype)
        return to_hidden, cast_weight, cast_bias, None, None, None, None, None


def _chunks(num_tokens: int, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, num_tokens, chunk)]


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, rule: LogitRule, part: Part | None) -> Tensor:
    """Return logits [n, v] in float32, -inf for padding."""
    logits = rule(torch.nn.functional.linear(hidden.to(weight.dtype), weight, bias))
    if part is not None:
        num_rows = max(0, part.vocabulary - part.group.rank() * len(weight))
        logits[:, num_rows:] = -torch.inf
    return logits


def _divided(logits: Tensor, temperature: float, *, keep: bool) -> Tensor:
    """Return logits / temperature, computed in place unless the logits are kept."""
    return logits / temperature if keep else logits.div_(temperature)


def _own_rows(targets: Tensor, num_rows: int, part: Part | None) -> tuple[Tensor, Tensor]:
    """Return the row of each target on this device, and a mask of the targets that are on this device."""
    row = targets - (0 if part is None else part.group.rank() * num_rows)
    is_here = (row >= 0) & (row < num_rows)
    return row.clamp(0, num_rows - 1), is_here


def _reduce(tensor: Tensor, part: Part | None, op: Any = dist.ReduceOp.SUM) -> None:
    if part is not None:
        dist.all_reduce(tensor, op, part.group)
