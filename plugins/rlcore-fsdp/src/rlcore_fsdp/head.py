"""Log-probability and entropy of tokens from hidden states, forward and backward, without the logits of all tokens.

The logits z = h Wᵀ (+ b) exist for one chunk of tokens at a time, in float32. With more than one chunk, the backward
pass recomputes the logits of each chunk. The gradient of W is accumulated in float32. With p = softmax(z / t) and its
entropy H:

    d log p(y) / dz = (onehot(y) - p) / t          dH / dz = -p · (log p + H) / t

Shapes: n tokens, V vocabulary, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_CHUNK_VALUES = 2**25
"""Number of logits in one chunk: 128 MB in float32."""
_LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True, slots=True)
class LogitRule:
    """Scaling and soft-capping that a model family applies to its logits."""

    scale: float
    softcap: float | None

    @classmethod
    def of(cls, config: Any) -> LogitRule:
        scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
        return cls(scale, getattr(config, "final_logit_softcapping", None))

    def __call__(self, raw: Tensor) -> Tensor:
        """Return logits […, V] in float32 from the product with the embedding."""
        logits = raw.float() if self.scale == 1.0 else raw.float() * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def slope(self, logits: Tensor) -> Tensor | float:
        """Return d logits / d raw, computed from the logits."""
        return self.scale if self.softcap is None else self.scale * (1.0 - (logits / self.softcap) ** 2)


def token_statistics(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float,
    rule: LogitRule,
    chunk: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return the log-probability [n] of `targets` and the entropy [n] in nats, float32, from hidden states [n, D].

    Args:
        chunk: number of tokens in a chunk; 0 derives it from the size of the vocabulary.
    """
    chunk = chunk or max(1, _CHUNK_VALUES // len(weight))
    statistics: Any = _TokenStatistics
    result: tuple[Tensor, Tensor] = statistics.apply(hidden, weight, bias, targets, temperature, rule, chunk)
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
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        log_probs, entropy, normaliser = (hidden.new_empty(len(targets), dtype=torch.float32) for _ in range(3))
        kept = None
        for at in _chunks(len(targets), chunk):
            logits = rule(_raw(hidden[at], weight, bias))
            kept = logits if len(targets) <= chunk else None
            scaled = _divided(logits, temperature, keep=kept is not None)
            normaliser[at] = scaled.logsumexp(-1)
            log_probs[at] = scaled.gather(-1, targets[at, None]).squeeze(-1) - normaliser[at]
            p = (scaled - normaliser[at, None]).exp_()
            # a logit of -inf has p = 0 and must not contribute to the mean of the logits
            entropy[at] = normaliser[at] - p.mul_(scaled.clamp_(min=_LOWEST)).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, normaliser, entropy, kept)
        ctx.options = temperature, rule, chunk
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        of_log_probs, of_entropy = gradients
        hidden, weight, bias, targets, normaliser, entropy, kept = ctx.saved_tensors
        temperature, rule, chunk = ctx.options
        to_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        to_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        to_bias = torch.zeros_like(bias, dtype=torch.float32) if ctx.needs_input_grad[2] else None
        for at in _chunks(len(targets), chunk):
            logits = rule(_raw(hidden[at], weight, bias)) if kept is None else kept
            slope = rule.slope(logits)
            log_p = (_divided(logits, temperature, keep=kept is not None) - normaliser[at, None]).clamp_(min=_LOWEST)
            of_chosen, of_spread = of_log_probs[at, None], of_entropy[at, None]
            raw = log_p.exp().neg_()
            raw.mul_(log_p.add_(entropy[at, None]).mul_(of_spread).add_(of_chosen))
            raw.scatter_add_(-1, targets[at, None], of_chosen)
            raw = raw.mul_(slope / temperature).to(weight.dtype)
            if to_hidden is not None:
                to_hidden[at] = raw @ weight
            if to_weight is not None:
                to_weight += (raw.t() @ hidden[at].to(weight.dtype)).float()
            if to_bias is not None:
                to_bias += raw.float().sum(0)
        cast_weight = None if to_weight is None else to_weight.to(weight.dtype)
        cast_bias = None if to_bias is None else to_bias.to(bias.dtype)
        return to_hidden, cast_weight, cast_bias, None, None, None, None


def _chunks(num_tokens: int, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, num_tokens, chunk)]


def _raw(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(hidden.to(weight.dtype), weight, bias)


def _divided(logits: Tensor, temperature: float, *, keep: bool) -> Tensor:
    """Return logits / temperature, computed in place unless the logits are kept."""
    return logits / temperature if keep else logits.div_(temperature)
