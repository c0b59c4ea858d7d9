"""Ulysses: between layers each rank of a context group holds a part of the tokens, inside attention a part of the heads.

DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509), around any core attention of megatron-core, whose own context
parallelism stays off. Shapes: R ranks of the group, t tokens of a rank, T = R · t, H heads, h = H / R, D head size.
"""

from __future__ import annotations

import copy
from typing import Any

import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn


class SharedAttention(nn.Module):
    """`core_attention` of a layer whose ranks hold parts of the tokens: `inner` sees all tokens and some of the heads."""

    def __init__(
        self, config: TransformerConfig, *args: Any, inner: type[nn.Module], context: dist.ProcessGroup, **options: Any
    ) -> None:
        super().__init__()
        of_rank = copy.copy(config)
        of_rank.num_attention_heads //= context.size()
        of_rank.num_query_groups //= context.size()
        self.inner = inner(of_rank, *args, **options)
        self._context = context

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, packed_seq_params: Any, **options: Any
    ) -> Tensor:
        """[t, H·D] from query [t, H, D], key and value [t, H_kv, D]."""
        heads = (tokens_to_heads(states, self._context) for states in (query, key, value))
        out = self.inner(*heads, *args, packed_seq_params=packed_seq_params.whole, **options)
        return heads_to_tokens(out.flatten(1), self._context)


def tokens_to_heads(states: Tensor, context: dist.ProcessGroup) -> Tensor:
    """[t, H, D] of this rank's tokens -> [T, h, D] of this rank's heads."""
    tokens, heads, width = states.shape
    size = context.size()
    by_rank = states.reshape(tokens, size, heads // size, width).transpose(0, 1)  # which heads go where
    got: Tensor = all_to_all(context, by_rank)
    return got.flatten(0, 1)


def heads_to_tokens(out: Tensor, context: dist.ProcessGroup) -> Tensor:
    """[T, h·D] of this rank's heads -> [t, H·D] of this rank's tokens."""
    got: Tensor = all_to_all(context, out.unflatten(0, (context.size(), -1)))  # [R, t, h·D]: whose heads they are
    return got.transpose(0, 1).flatten(1)
