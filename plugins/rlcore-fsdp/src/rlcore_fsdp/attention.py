"""Attention over packed samples, with the variable-length flash kernel if supported, else with rlcore's buckets.

Registered with transformers as "rlcore_fsdp". Shapes: T tokens, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.kits.backend.ulysses import heads_to_tokens, tokens_to_heads
from rlcore.models.attention import Packing, packed_attention, refuse_unknown
from rlcore.models.attention import register as register_attention

NAME = "rlcore_fsdp"
_HALF = (torch.bfloat16, torch.float16)
_LARGEST_HEAD = 256
"""Largest head size of the flash kernel."""


class Layout:
    """Positions of the samples in one micro-batch, and the tokens that this rank holds; shared by all layers."""

    def __init__(
        self, lengths: Sequence[int], device: torch.device | str, context: dist.ProcessGroup | None = None
    ) -> None:
        self.context = context
        self._size, self._rank = (1, 0) if context is None else (context.size(), context.rank())
        self.padding = -sum(lengths) % self._size
        """Number of padding tokens, added as a last sample, so that all ranks of a context group hold equally many."""
        lengths = [length for length in lengths if length] + ([self.padding] if self.padding else [])
        self.packing = Packing(lengths, device)
        self.longest = max(lengths)
        self.borders = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
        self.num_tokens = sum(lengths) // self._size
        """Number of tokens that this rank holds."""
        self.start = self.num_tokens * self._rank
        """Position of this rank's first token."""

    @property
    def position_ids(self) -> Tensor:
        """Positions in their samples [1, t] of this rank's tokens."""
        return self.share(self.packing.position_ids[0])[None]

    def share(self, tokens: Tensor) -> Tensor:
        """Return this rank's part of a column [T], including padding."""
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
    """Compute attention [1, T, H, D] for transformers from query [1, H, T, D], key and value [1, H_kv, T, D].

    Args:
        attention_mask: the window, from `window_of_mask`; some families pass the window only this way.
    """
    if packing is None:
        raise TypeError("samples cannot be packed: its layers do not pass `packing` on to their attention")
    refuse_unknown(module, attention_mask, options)
    window = attention_mask if sliding_window is None else sliding_window
    if packing.context is not None:
        query, key, value = (_exchanged(states, packing.context) for states in (query, key, value))
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
    return (out if packing.context is None else heads_to_tokens(out[0], packing.context)[None]), None


def fits_kernel(query: Tensor, value: Tensor) -> bool:
    """Return whether the flash kernel supports this type and head size; in multi-head latent attention sizes differ."""
    size = query.shape[-1]
    return query.dtype in _HALF and size == value.shape[-1] and size % 8 == 0 and size <= _LARGEST_HEAD


def _exchanged(states: Tensor, context: dist.ProcessGroup) -> Tensor:
    """Exchange [1, H, t, D] of this rank's tokens for [1, h, T, D] of this rank's heads."""
    return tokens_to_heads(states[0].transpose(0, 1), context).transpose(0, 1)[None]


def _flash(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scaling: float | None, window: int | None) -> Tensor:
    """Call the kernel, which takes [T, H, D] and sample borders; (left, 0) is causal with a window, (-1, 0) without."""
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
    """Register the attention with transformers. Idempotent. Its loops are excluded from compilation."""
    disable: Any = torch.compiler.disable
    register_attention(NAME, disable(attention) if compiled else attention)
