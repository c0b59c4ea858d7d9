"""Ulysses: each rank of a context group holds a part of the tokens between layers, and a part of the heads in attention.

DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509) around any core attention of megatron-core, whose own context
parallelism stays off. Shapes: R ranks of the group, t tokens of a rank, T = R · t, H heads, h = H / R, D head size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from rlcore.kits.backend.ulysses import heads_to_tokens, tokens_to_heads


def shared_attention(
    core: Callable[..., Any], context: dist.ProcessGroup, *, config: TransformerConfig, **options: Any
) -> nn.Module:
    """Wrap the attention `core` so that it gets all tokens and a part of the heads; layers hold a part of the tokens."""
    of_rank = copy.copy(config)
    of_rank.num_attention_heads //= context.size()
    of_rank.num_query_groups //= context.size()
    module: nn.Module = core(config=of_rank, **options)
    attend = module.forward

    def forward(query: Tensor, key: Tensor, value: Tensor, *args: Any, packed_seq_params: Any, **given: Any) -> Tensor:
        """Compute [t, H·D] from query [t, H, D], key and value [t, H_kv, D]."""
        heads = (tokens_to_heads(states, context) for states in (query, key, value))
        out = attend(*heads, *args, packed_seq_params=packed_seq_params.whole, **given)
        return heads_to_tokens(out.flatten(1), context)

    module.forward = forward
    return module
