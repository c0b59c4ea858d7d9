"""KV cache of the running sequences, and the attention that reads it.

The `hf` engine calls a transformers model with `step=Prefill(...)` or `step=Decode(...)`, which its layers pass to the
attention function below. So the model runs without transformers' own cache and masks, which cost more than a tiny
model itself. Slots 0..n-1 of the cache are the n running sequences, in the engine's order.
Shapes: n sequences, L their longest length, H heads, G key/value heads, D head size, T packed prompt tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlcore.errors import ModelError
from rlcore.models.attention import Packing, capped_attention, packed_attention

NAME = "rlcore_cached"
_MEANINGLESS = {"position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states"}
_MEANINGLESS |= {"output_router_logits", "return_dict"}
"""Options that reach the attention function and do not change its result."""


class KeyValueCache:
    """Buffers per layer, [slots, G, length, D], created on the layer's first write and grown by `reserve`."""

    def __init__(self) -> None:
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._num_slots = 0
        self._length = 0

    def reserve(self, num_slots: int, length: int, *, limit: int) -> None:
        """Make room for `num_slots` sequences of this length. Lengths at least double, up to `limit`."""
        if num_slots <= self._num_slots and length <= self._length:
            return
        if length > self._length:
            length = min(max(length, 2 * self._length, 64), limit)
        self._num_slots, self._length = num_slots, max(length, self._length)
        for index, (keys, values) in self._layers.items():
            self._layers[index] = (self._grown(keys), self._grown(values))

    def _grown(self, old: Tensor) -> Tensor:
        # Zeros: positions beyond a sequence's end have weight 0, and 0 · NaN would be NaN.
        new = old.new_zeros((self._num_slots, old.shape[1], self._length, old.shape[3]))
        slots = min(len(new), len(old))
        new[:slots, :, : old.shape[2]] = old[:slots]
        return new

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the buffers of a layer, with heads, sizes and dtype of `key` and `value` [*, G, *, D]."""
        if index not in self._layers:
            empty = (states.new_zeros((0, states.shape[1], 0, states.shape[3])) for states in (key, value))
            keys, values = (self._grown(states) for states in empty)
            self._layers[index] = (keys, values)
        return self._layers[index]

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots over others that are no longer needed."""
        if not sources:
            return
        for keys, values in self._layers.values():
            source = torch.tensor(sources, device=keys.device)
            target = torch.tensor(targets, device=keys.device)
            keys[target] = keys[source]
            values[target] = values[source]


class Prefill:
    """The first pass over new sequences: distinct prompts, concatenated, each written to the slots that share it."""

    def __init__(
        self, cache: KeyValueCache, lengths: Sequence[int], prompt_of_slot: Sequence[int], first_slot: int, device: Any
    ) -> None:
        self.cache = cache
        self.packing = Packing(lengths, device)
        self.position_ids = self.packing.position_ids
        lengths_P = torch.tensor(lengths)
        ends_P = lengths_P.cumsum(0)
        chosen = torch.tensor(prompt_of_slot)
        place = torch.arange(max(lengths))
        self.last_tokens = (ends_P - 1).to(device)
        # Beyond its end a sequence repeats its last token, which is finite, and masked until overwritten.
        places = (ends_P - lengths_P)[chosen, None] + torch.minimum(place, lengths_P[chosen, None] - 1)
        self._places = places.reshape(-1).to(device)
        self._slots = slice(first_slot, first_slot + len(prompt_of_slot))
        self._shape = places.shape

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        """Return [1, T, H, D] from [1, H, T, D] and [1, G, T, D]."""
        for buffer, states in zip(self.cache.layer(module.layer_idx, key, value), (key, value)):
            chosen = states[0].index_select(1, self._places)
            side_by_side = chosen.view(len(chosen), *self._shape, -1).transpose(0, 1)
            buffer[self._slots, :, : self._shape[1]] = side_by_side
        return packed_attention(module, query, key, value, None, packing=self.packing, **options)[0]


class Decode:
    """One more token for each of the first n slots."""

    def __init__(self, cache: KeyValueCache, positions: Sequence[int], device: Any) -> None:
        self.cache = cache
        self.position_ids = torch.tensor(positions, device=device)[:, None]
        self._longest = max(positions) + 1
        self._ragged = min(positions) + 1 < self._longest
        self._slots = torch.arange(len(positions), device=device)
        self._masks: dict[int, Tensor] = {}

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        """Return [n, 1, H, D] from [n, H, 1, D] and [n, G, 1, D]."""
        num_rows, num_heads, _, size = query.shape
        num_groups = key.shape[1]
        keys, values = self.cache.layer(module.layer_idx, key, value)
        self._write(keys, key)
        self._write(values, value)
        # Heads that share keys become queries of one head, so that no kernel needs to support groups.
        q = query.reshape(num_rows, num_groups, num_heads // num_groups, size)
        k, v = (states[:num_rows, :, : self._longest] for states in (keys, values))
        out = self._attend(q, k, v, options)
        return out.reshape(num_rows, 1, num_heads, value.shape[3])

    def _write(self, buffer: Tensor, new: Tensor) -> None:
        if self._ragged:
            buffer[self._slots, :, self.position_ids[:, 0]] = new[:, :, 0]
        else:
            buffer[: len(new), :, self._longest - 1] = new[:, :, 0]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        mask = self._mask(options.get("sliding_window"))
        softcap, scaling = options.get("softcap"), options.get("scaling")
        if softcap is None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
        if mask is None:
            mask = torch.ones(1, dtype=torch.bool, device=q.device)
        return capped_attention(q, k, v, mask, scaling=scaling, softcap=softcap)

    def _mask(self, window: int | None) -> Tensor | None:
        """Return [n, 1, 1, L] bool, None if every sequence attends to everything; cached per step and window."""
        size = self._longest if window is None else min(window, self._longest)
        if size == self._longest and not self._ragged:
            return None
        if size not in self._masks:
            distance = self.position_ids - torch.arange(self._longest, device=self.position_ids.device)
            self._masks[size] = ((distance >= 0) & (distance < size))[:, None, None]
        return self._masks[size]


def cached_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: int | None,
    *,
    step: Prefill | Decode | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention for transformers, in models called with `step=`.

    Args:
        attention_mask: the window, from `window_of_mask`; for some families this is the only source.

    Raises:
        ModelError: the layer requires something other than causal attention with window and soft cap.
    """
    unknown = [name for name, value in options.items() if value is not None and name not in _MEANINGLESS]
    if step is None or unknown or is_causal is False or isinstance(attention_mask, Tensor):
        reason = ", ".join(unknown) or "something other than plain causal self-attention"
        raise ModelError(
            f"the attention of {type(module).__name__} requires {reason}, which rollout=hf does not support\n"
            "Use another engine for this model:  rollout=vllm"
        )
    window = attention_mask if sliding_window is None else sliding_window
    meaning = {"scaling": scaling, "sliding_window": window, "softcap": softcap}
    return step.attend(module, query, key, value, meaning), None
