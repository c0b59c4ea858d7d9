"""Ulysses: each rank of a context group holds a part of the tokens between layers, and a part of the heads in attention.

Two all-to-alls per attention switch between the two layouts. `sum_parts` combines the outputs of all ranks after the last
layer. Shapes: R ranks of the group, t tokens of a rank, T = R · t, H heads, h = H / R, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.errors import ConfigError


def tokens_to_heads(states: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange [1, H, t, D] of this rank's tokens for [1, h, T, D] of this rank's heads."""
    size = group.size()
    _, heads, tokens, width = states.shape
    by_rank = states[0].reshape(size, heads // size, tokens, width)  # by receiving rank
    got = _exchange(by_rank, group)  # [R, h, t, D], by sending rank
    return got.transpose(0, 1).reshape(1, heads // size, size * tokens, width)


def heads_to_tokens(out: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange [1, T, h, D] of this rank's heads for [1, t, H, D] of this rank's tokens."""
    size = group.size()
    _, total, heads, width = out.shape
    got = _exchange(out[0].reshape(size, total // size, heads, width), group)  # [R, t, h, D], by sending rank
    return got.transpose(0, 1).reshape(1, total // size, size * heads, width)


def sum_parts(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum values [n], where each entry is nonzero on one rank only, so that all ranks have all entries.

    All ranks compute the same loss from the sum, so the backward pass does not sum gradients over ranks.
    """
    if group is None:
        return values
    add: Any = _Sum
    result: Tensor = add.apply(values, group)
    return result


def check_heads(config: Any, size: int) -> None:
    """Check that the ranks can share the heads equally.

    Raises:
        ConfigError: `size` does not divide the number of heads.
    """
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None) or config.num_attention_heads
        if heads % size:
            fits = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            raise ConfigError(
                f"context_parallel={size} does not divide the {heads} {name} of this model\n"
                f"Type  backend.context_parallel=N  with N one of {fits}"
            )


def _exchange(by_rank: Tensor, group: dist.ProcessGroup) -> Tensor:
    exchange: Any = _Exchange
    result: Tensor = exchange.apply(by_rank, group)
    return result


class _Exchange(torch.autograd.Function):
    """All-to-all of [R, …]: entry r is sent to rank r and replaced with the entry received from rank r."""

    @staticmethod
    def forward(ctx: Any, by_rank: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(by_rank, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(gradients[0], ctx.group), None


def _all_to_all(by_rank: Tensor, group: dist.ProcessGroup) -> Tensor:
    by_rank = by_rank.contiguous()
    got = torch.empty_like(by_rank)
    dist.all_to_all_single(got, by_rank, group=group)
    return got


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
