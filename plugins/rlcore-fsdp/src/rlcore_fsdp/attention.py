"""Attention over packed samples: the variable-length flash kernel where it runs, the core's buckets elsewhere.

Registered with transformers as "rlcore_fsdp". Shapes: T tokens, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.models.attention import Packing, packed_attention, refuse_unknown, window_of_mask
from rlcore_fsdp.context_parallel import heads_to_tokens, tokens_to_heads

NAME = "rlcore_fsdp"
_HALF = (torch.bfloat16, torch.float16)
_LARGEST_HEAD = 256
"""Of the flash kernel."""


class Layout:
    """How the samples of one micro-batch lie, and who holds their tokens; made once, used by every layer."""

    def __init__(
        self, lengths: Sequence[int], device: torch.device | str, context: dist.ProcessGroup | None = None
    ) -> None:
        self.context = context
        self._size, self._rank = (1, 0) if context is None else (context.size(), context.rank())
        self.padding = -sum(lengths) % self._size
        """Tokens of a last sample that nobody looks at, so that the ranks of a context group have equally many."""
        lengths = [length for length in lengths if length] + ([self.padding] if self.padding else [])
        self.packing = Packing(lengths, device)
        self.longest = max(lengths)
        self.borders = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
        self.num_tokens = sum(lengths) // self._size
        """Tokens that this rank holds."""
        self.start = self.num_tokens * self._rank
        """The first of them."""

    @property
    def position_ids(self) -> Tensor:
        """[1, tokens of this rank]"""
        return self.share(self.packing.position_ids[0])[None]

    def share(self, tokens: Tensor) -> Tensor:
        """This rank's part of a [T] column, padding included."""
        return tokens[self.start : self.start + self.num_tokens]


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: int | None,
    *,
    packing: Layout | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention for transformers: query [1, H, T, D], key and value [1, H_kv, T, D]; returns [1, T, H, D].

    Args:
        attention_mask: the window, from `window_of_mask`; some families pass it in no other way.
    """
    if packing is None:
        raise TypeError("samples cannot be packed: its layers do not hand `packing` on to their attention")
    refuse_unknown(module, attention_mask, options)
    window = attention_mask if sliding_window is None else sliding_window
    if packing.context is not None:
        query, key, value = (tokens_to_heads(states, packing.context) for states in (query, key, value))
    if query.is_cuda and softcap is None and fits_kernel(query, value):
        out = _flash(query, key, value, packing, scaling, window)
    else:
        out, _ = packed_attention(
            module,
            query,
            key,
            value,
            None,
            packing=packing.packing,
            scaling=scaling,
            sliding_window=window,
            softcap=softcap,
        )
    return (out if packing.context is None else heads_to_tokens(out, packing.context)), None


def fits_kernel(query: Tensor, value: Tensor) -> bool:
    """Whether the flash kernel has this type and these sizes of heads; heads of multi-head latent attention differ."""
    size = query.shape[-1]
    return query.dtype in _HALF and size == value.shape[-1] and size % 8 == 0 and size <= _LARGEST_HEAD


def _flash(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scaling: float | None, window: int | None) -> Tensor:
    """The kernel takes [T, H, D] and the borders of samples; (left, 0) is causal with a window, (-1, 0) without."""
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = (states[0].transpose(0, 1).contiguous() for states in (q, k, v))
    out = varlen_attn(
        query,
        key,
        value,
        layout.borders,
        layout.borders,
        layout.longest,
        layout.longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(out, Tensor)
    return out[None]


def register(*, compiled: bool = False) -> None:
    """Make "rlcore_fsdp" known to transformers; may be called twice. Its loops are not for the compiler."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    disable: Any = torch.compiler.disable
    AttentionInterface.register(NAME, disable(attention) if compiled else attention)
    AttentionMaskInterface.register(NAME, window_of_mask)
