"""Context parallelism: each rank holds a part of the tokens between layers, and a part of the heads in attention.

DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509): two all-to-alls per attention switch between the layouts. After
the last layer, each rank computes the outputs of its own tokens, and `join` combines them. Shapes: R ranks of the group,
t tokens of a rank, T = R · t, H heads, h = H / R, D head size, n tokens under the loss.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def tokens_to_heads(states: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange [t, H, D] of this rank's tokens for [T, h, D] of this rank's heads."""
    tokens, heads, width = states.shape
    by_rank = states.reshape(tokens, group.size(), heads // group.size(), width).transpose(0, 1)  # by receiving rank
    return _exchange(by_rank, group).flatten(0, 1)


def heads_to_tokens(out: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange [T, h, D] or [T, h·D] of this rank's heads for [t, H, D] or [t, H·D] of this rank's tokens."""
    got = _exchange(out.reshape(group.size(), -1, *out.shape[1:]), group)  # [R, t, h, D], by sending rank
    return got.transpose(0, 1).flatten(1, 2)


def own_places(positions: Tensor, group: dist.ProcessGroup | None, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return which of the positions [n] in a micro-batch are on this rank, and their places among its tokens."""
    places = positions - (0 if group is None else group.rank() * num_tokens)
    mine = ((places >= 0) & (places < num_tokens)).nonzero().squeeze(1)
    return mine, places[mine]


def join(outputs: Tensor, mine: Tensor, num_outputs: int, group: dist.ProcessGroup | None) -> Tensor:
    """Return the outputs [k, n] of all ranks from those of this rank, which are at `mine`.

    All ranks compute the same loss from them, so the backward pass does not sum gradients over ranks.
    """
    if group is None:
        return outputs
    add: Any = _Sum
    result: Tensor = add.apply(outputs.new_zeros(len(outputs), num_outputs).index_copy(1, mine, outputs), group)
    return result


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
