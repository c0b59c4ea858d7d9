"""Attention over packed samples: they are concatenated for all other layers and do not attend to each other.

Registered with transformers as "rlcore_packed". The model is called with `input_ids [1, T]`, positions that restart at
0, no attention mask and `packing=Packing(...)`, which its layers pass to this function. Samples of similar length share
a bucket, padded on the right, where the causal mask excludes the padding; equal lengths are sliced without a copy.
Shapes: T tokens, H heads, D head size, n samples of a bucket, L the longest length in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlcore.errors import ModelError

NAME = "rlcore_packed"
_MIN_FILL = 0.75
"""Minimum ratio of the shortest to the longest sample of a bucket."""
_REFUSED = ("s_aux", "sinks", "head_mask")
ADVICE = "No backend takes it: choose a model of another family, such as Llama, Qwen3, Gemma 3 or Mistral."
"""Second line of errors about models with unsupported attention."""


@dataclass(frozen=True, slots=True)
class _Bucket:
    num_samples: int
    longest: int
    index: Tensor | None
    """[n · L] token at each position, padding repeats the last one; None: the samples fill start:stop exactly."""
    places: Tensor | None
    """Positions with a token, in token order; None: all."""
    start: int
    stop: int


class Packing:
    """Layout of the samples of a micro-batch; created once and used by every layer."""

    def __init__(self, lengths: Sequence[int], device: torch.device | str) -> None:
        self.device = device
        starts = [0, *accumulate(lengths)]
        self._total = starts[-1]
        samples = [(length, start) for length, start in zip(lengths, starts) if length]
        order = sorted(samples, key=lambda sample: (-sample[0], sample[1]))
        self.buckets: list[_Bucket] = []
        while order:
            longest = order[0][0]
            members = [sample for sample in order if sample[0] >= _MIN_FILL * longest]
            order = order[len(members) :]
            self.buckets.append(_bucket(sorted(members, key=lambda sample: sample[1]), device))
        tokens = [_tokens(bucket) for bucket in self.buckets]
        order_of_tokens = torch.cat(tokens) if tokens else torch.zeros(0, dtype=torch.int64)
        in_order = bool((order_of_tokens[1:] > order_of_tokens[:-1]).all())
        self._restore = None if in_order else order_of_tokens.argsort().to(device)
        self.position_ids = torch.cat([torch.arange(length) for length in lengths] or [order_of_tokens])[None].to(
            device
        )

    def merge(self, outputs: Sequence[Tensor]) -> Tensor:
        """Combine the outputs of the buckets into [T, H, D] in token order."""
        whole = outputs[0] if len(outputs) == 1 else torch.cat(list(outputs))
        return whole if self._restore is None else whole[self._restore]


def _bucket(members: Sequence[tuple[int, int]], device: torch.device | str) -> _Bucket:
    longest = max(length for length, _ in members)
    start, stop = members[0][1], members[-1][1] + members[-1][0]
    if stop - start == len(members) * longest and all(length == longest for length, _ in members):
        return _Bucket(len(members), longest, None, None, start, stop)
    lengths = torch.tensor([length for length, _ in members])
    starts = torch.tensor([begin for _, begin in members])
    place = torch.arange(longest)[None]
    index = starts[:, None] + torch.minimum(place, lengths[:, None] - 1)
    places = (place < lengths[:, None]).reshape(-1).nonzero().squeeze(1)
    return _Bucket(len(members), longest, index.reshape(-1).to(device), places.to(device), start, stop)


def _tokens(bucket: _Bucket) -> Tensor:
    """Return the token numbers of a bucket in the order of its outputs, on the CPU."""
    if bucket.index is None or bucket.places is None:
        return torch.arange(bucket.start, bucket.stop)
    return bucket.index[bucket.places].cpu()


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: int | None,
    *,
    packing: Packing | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention for transformers: query [1, H, T, D], key and value [1, H_kv, T, D]; returns [1, T, H, D].

    Args:
        attention_mask: the window, from `window_of_mask`; for some families this is the only source.
    """
    refuse_unknown(module, attention_mask, options)
    if packing is None:
        raise TypeError("samples cannot be packed: its layers do not pass `packing` to their attention")
    window = attention_mask if sliding_window is None else sliding_window
    outputs = []
    for bucket in packing.buckets:
        q, k, v = (_side_by_side(states[0], bucket) for states in (query, key, value))
        out = attend(q, k, v, scaling=scaling, window=window, softcap=softcap)
        flat = out.transpose(1, 2).reshape(-1, out.shape[1], out.shape[3])
        outputs.append(flat if bucket.places is None else flat.index_select(0, bucket.places))
    return packing.merge(outputs)[None], None


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, scaling: float | None, window: int | None, softcap: float | None
) -> Tensor:
    """Compute causal attention of [n, H, L, D] on [n, H_kv, L, D]."""
    length = q.shape[2]
    grouped = q.shape[1] != k.shape[1]
    windowed = window is not None and window < length
    if softcap is None and not windowed:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped)
    mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    if windowed and window is not None:
        mask &= ~mask.tril(-window)
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=grouped)
    return capped_attention(q, k, v, mask, scaling=scaling, softcap=softcap)


def capped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, scaling: float | None, softcap: float) -> Tensor:
    """Compute attention with scores softcap · tanh(score / softcap), as in Gemma 2."""
    if q.shape[1] != k.shape[1]:
        k, v = (states.repeat_interleave(q.shape[1] // states.shape[1], dim=1) for states in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1, dtype=torch.float32).to(q.dtype)
    return weights @ v


def refuse_unknown(module: Any, attention_mask: Tensor | int | None, options: dict[str, Any]) -> None:
    """Raise ModelError for a mask or an option that changes the result of attention."""
    asked = [name for name in _REFUSED if options.get(name) is not None]
    asked += ["a custom mask"] * isinstance(attention_mask, Tensor)
    if asked:
        what = f"{type(module).__name__} requires attention with '{asked[0]}'"
        raise ModelError(f"{what}, which rlcore's attention does not support\n{ADVICE}")


def check_kind(config: Any) -> None:
    """Raise ModelError for an attention that packing does not support; called before a model is loaded."""
    config = config.get_text_config()
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        what = f"{config.model_type} has attention in chunks of {config.attention_chunk_size} tokens"
        raise ModelError(f"{what}, which rlcore's attention does not support\n{ADVICE}")


def _side_by_side(states: Tensor, bucket: _Bucket) -> Tensor:
    """Reshape [H, T, D] to [n, H, L, D]."""
    heads, _, size = states.shape
    index = bucket.index
    chosen = states[:, bucket.start : bucket.stop] if index is None else states.index_select(1, index)
    return chosen.reshape(heads, bucket.num_samples, bucket.longest, size).transpose(0, 1)


def register(name: str = NAME, attend: Callable[..., tuple[Tensor, None]] = packed_attention) -> None:
    """Register an attention function with transformers, with the window in place of a mask. May be called twice."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, window_of_mask)


def window_of_mask(*args: Any, local_size: int | None = None, **options: Any) -> int | None:
    """Return the window instead of the mask that transformers requests; chunks are refused elsewhere."""
    return local_size
