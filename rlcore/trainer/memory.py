"""An estimate of memory per device and role, from the model directory alone; nothing is loaded.

Counted: parameters, gradients, AdamW moments (all float32), activations of one micro-batch, and the cache of keys and
values of the requests that run together. Not counted: logits, of which one chunk of tokens exists at a time (about half
a gigabyte with its gradient), and the framework itself (0.5 to 1 GB a process).
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FLOAT32 = 4
_ACTIVATIONS_PER_LAYER = 34
"""Bytes per token and hidden unit that a transformer layer keeps in 16 bit (Korthikanti et al. 2022, eq. 1, without
the attention matrix); twice that in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """What the estimate needs to know of a model."""

    num_parameters: int
    num_layers: int
    hidden_size: int
    num_kv_values: int
    """Numbers of keys and values per token and layer."""

    @classmethod
    def read(cls, path: Path) -> ModelSize:
        """From config.json and the headers of the safetensors files."""
        config: dict[str, Any] = json.loads((path / "config.json").read_text())
        config = config | config.get("text_config", {})
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        head_dim = config.get("head_dim") or hidden // heads
        kv_heads = config.get("num_key_value_heads") or heads
        return cls(
            num_parameters=sum(_count_parameters(file) for file in path.glob("*.safetensors")),
            num_layers=config["num_hidden_layers"],
            hidden_size=hidden,
            num_kv_values=2 * kv_heads * head_dim,
        )


def trained_bytes(size: ModelSize, *, max_tokens: int, half: bool, checkpointing: bool) -> int:
    """Parameters, gradients, two moments, and one micro-batch of activations."""
    return size.num_parameters * 4 * _FLOAT32 + activation_bytes(
        size, max_tokens=max_tokens, half=half, checkpointing=checkpointing
    )


def frozen_bytes(size: ModelSize) -> int:
    """Parameters only."""
    return size.num_parameters * _FLOAT32


def activation_bytes(size: ModelSize, *, max_tokens: int, half: bool, checkpointing: bool) -> int:
    """What the forward pass keeps for the backward pass."""
    per_token = size.hidden_size * _ACTIVATIONS_PER_LAYER * (1 if half else 2)
    layers = 1 if checkpointing else size.num_layers
    inputs = size.num_layers * size.hidden_size * 2 if checkpointing else 0
    return max_tokens * (layers * per_token + inputs)


def rollout_bytes(size: ModelSize, *, num_sequences: int, max_tokens: int, half: bool) -> int:
    """Weights, and keys and values of the sequences that run together."""
    width = 2 if half else _FLOAT32
    return size.num_parameters * width + num_sequences * max_tokens * size.num_layers * size.num_kv_values * width


def human(num_bytes: float) -> str:
    """1536 -> "1.5 KB"."""
    for unit in ("B", "KB", "MB", "GB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TB"


def _count_parameters(file: Path) -> int:
    """From the header: 8 bytes of its length, then JSON with the shape of every tensor."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    total = 0
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        count = 1
        for size in tensor["shape"]:
            count *= size
        total += count
    return total
