"""Log-probability and entropy of tokens over a vocabulary split over tensor-parallel devices, without gathering logits.

The logits z = h Wᵀ / t exist for one chunk of tokens and this device's part of the vocabulary at a time, in float32, and
are recomputed in the backward pass. Devices exchange four numbers per token. With p = softmax(z), its entropy H and
z̄ = Σ p z:

    log p(y) = z_y - lse      H = lse - z̄      d log p(y) / dz = onehot(y) - p      dH / dz = -p · (log p + H)

Shapes: n tokens, v rows of the vocabulary on this device, D hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_CHUNK_VALUES = 2**25
"""Number of logits in one chunk: 128 MB in float32."""


def token_statistics(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    vocabulary: int,
    group: dist.ProcessGroup,
    chunk: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return the log-probability [n] of `targets` and the entropy [n] in nats, float32, the same on all devices.

    Args:
        hidden: [n, D] hidden states.
        weight: [v, D] this device's part; rows beyond `vocabulary` are padding and have zero probability.
        chunk: number of tokens in a chunk; 0 derives it from the size of the part.
    """
    chunk = chunk or max(1, _CHUNK_VALUES // len(weight))
    statistics: Any = _TokenStatistics
    result: tuple[Tensor, Tensor] = statistics.apply(hidden, weight, targets, temperature, vocabulary, group, chunk)
    return result


class _TokenStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        vocabulary: int,
        group: dist.ProcessGroup,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        first = group.rank() * len(weight)
        log_probs, entropy, normaliser = (hidden.new_empty(len(targets), dtype=torch.float32) for _ in range(3))
        for at in _chunks(len(targets), chunk):
            logits = _logits(hidden[at], weight, temperature, vocabulary - first)
            highest = logits.amax(-1)
            dist.all_reduce(highest, dist.ReduceOp.MAX, group)
            p = (logits - highest[:, None]).exp_()
            place, here = _own(targets[at], first, len(weight))
            sums = torch.stack(
                [
                    p.sum(-1),
                    (p * logits.masked_fill(p == 0, 0.0)).sum(-1),  # padding is -inf, and 0 · -inf would be NaN
                    logits.gather(-1, place[:, None]).squeeze(-1).masked_fill(~here, 0.0),
                ]
            )
            dist.all_reduce(sums, group=group)
            normaliser[at] = highest + sums[0].log()
            log_probs[at] = sums[2] - normaliser[at]
            entropy[at] = normaliser[at] - sums[1] / sums[0]
        ctx.save_for_backward(hidden, weight, targets, normaliser, entropy)
        ctx.options = temperature, vocabulary, group, chunk, first
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        of_log_probs, of_entropy = gradients
        hidden, weight, targets, normaliser, entropy = ctx.saved_tensors
        temperature, vocabulary, group, chunk, first = ctx.options
        to_hidden = torch.empty_like(hidden)
        to_weight = torch.zeros_like(weight, dtype=torch.float32)
        for at in _chunks(len(targets), chunk):
            log_p = _logits(hidden[at], weight, temperature, vocabulary - first) - normaliser[at, None]
            log_p.clamp_(min=-1e4)  # for padding, p stays 0 and all terms finite
            chosen, spread = of_log_probs[at, None], of_entropy[at, None]
            slope = -log_p.exp() * (chosen + spread * (log_p + entropy[at, None]))
            place, here = _own(targets[at], first, len(weight))
            slope.scatter_add_(-1, place[:, None], chosen * here[:, None])
            slope = (slope / temperature).to(weight.dtype)
            to_hidden[at] = (slope @ weight).to(hidden.dtype)
            to_weight += (slope.t() @ hidden[at].to(weight.dtype)).float()
        dist.all_reduce(to_hidden, group=group)
        return to_hidden, to_weight.to(weight.dtype), None, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, temperature: float, valid: int) -> Tensor:
    """Return logits [n, v] in float32, -inf for padding."""
    logits = torch.nn.functional.linear(hidden.to(weight.dtype), weight).float() / temperature
    if valid < len(weight):
        logits[:, max(0, valid) :] = float("-inf")
    return logits


def _own(targets: Tensor, first: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return the row of each target in this device's part, and a mask of the targets that are in this part."""
    place = targets - first
    here = (place >= 0) & (place < rows)
    return place.clamp(0, rows - 1), here


def _chunks(num_tokens: int, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, num_tokens, chunk)]
