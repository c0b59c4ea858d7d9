"""Estimates of memory per device and role from the model directory, without loading the model.

Counted: parameters, gradients, AdamW moments (all float32), activations of one micro-batch, the KV cache of the
requests that run together, and, with device sharing, a weight update and the weights in host memory. Not counted:
logits, which exist for one chunk of tokens at a time (about half a gigabyte with its gradient), and the framework
itself (0.5 to 1 GB per process).
"""

from __future__ import annotations

import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from rlcore.errors import ModelError
from rlcore.models.load import read_config

_FLOAT32 = 4
_ACTIVATIONS_PER_LAYER = 34
"""Bytes per token and hidden unit that a transformer layer keeps in 16-bit precision (Korthikanti et al. 2022, eq. 1,
without the attention matrix); twice that in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Sizes of a model that the estimates use."""

    num_parameters: int
    num_layers: int
    hidden_size: int
    num_kv_values: int
    """Key and value numbers per token and layer."""
    vocab_size: int = 0
    context_length: int = 2048
    """Maximum number of tokens of a sequence."""
    tied: bool = False
    """True if input and output embedding are one parameter."""

    @classmethod
    def read(cls, path: Path) -> ModelSize:
        """Read config.json and the headers of the safetensors files."""
        whole = read_config(path)
        try:
            num_parameters = sum(_count_parameters(file) for file in path.glob("*.safetensors"))
        except (OSError, ValueError, KeyError, struct.error) as error:
            raise ModelError(
                f"the model in {path} cannot be read: {str(error).splitlines()[0]}\n"
                "Copy the whole directory again:  hf download OWNER/NAME --local-dir DIR"
            ) from error
        config = whole.get_text_config()
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        return cls(
            num_parameters=num_parameters,
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            num_kv_values=2 * kv_heads * head_dim,
            vocab_size=config.vocab_size,
            context_length=getattr(config, "max_position_embeddings", None) or 2048,
            tied=bool(config.tie_word_embeddings),
        )

    @property
    def head_size(self) -> int:
        """Parameters of the output embedding."""
        return self.vocab_size * self.hidden_size

    @property
    def layer_size(self) -> int:
        """Parameters of one layer, on average."""
        return (self.num_parameters - self.head_size * (1 if self.tied else 2)) // self.num_layers


def trained_bytes(size: ModelSize) -> int:
    """Return the bytes of parameters, gradients and two moments."""
    return size.num_parameters * 4 * _FLOAT32


def frozen_bytes(size: ModelSize) -> int:
    """Return the bytes of parameters alone."""
    return size.num_parameters * _FLOAT32


def activation_bytes(size: ModelSize, *, max_tokens: int, half: bool, checkpointing: bool) -> int:
    """Return the bytes that the forward pass keeps for the backward pass."""
    per_token = size.hidden_size * _ACTIVATIONS_PER_LAYER * (1 if half else 2)
    layers = 1 if checkpointing else size.num_layers
    inputs = size.num_layers * size.hidden_size * 2 if checkpointing else 0
    return max_tokens * (layers * per_token + inputs)


def rollout_bytes(size: ModelSize, *, num_sequences: int, max_tokens: int, half: bool) -> int:
    """Return the bytes of weights and of the KV cache of the sequences that run together."""
    width = 2 if half else _FLOAT32
    return size.num_parameters * width + num_sequences * max_tokens * size.num_layers * size.num_kv_values * width


def update_bytes(size: ModelSize, *, half: bool) -> int:
    """Return the bytes that a weight update needs in addition to an engine that is awake.

    The largest tensor exists three times: gathered, as the engine's copy, and as new memory of its layer. Matrices
    that an engine fuses are held until all parts of the layer have arrived.
    """
    return (2 if half else _FLOAT32) * max(3 * size.head_size, 3 * size.layer_size // 2)


def device_bytes() -> int:
    """Return the memory of the first GPU in bytes."""
    import torch

    return int(torch.cuda.get_device_properties(0).total_memory)


def machine_bytes() -> int:
    """Return the memory of this machine in bytes, or the limit of its control group."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    words = limit.read_text().strip() if limit.exists() else "max"
    return min(whole, int(words)) if words.isdigit() else whole


def human(num_bytes: float) -> str:
    """Format a size: 1536 -> "1.5 KB"."""
    for unit in ("B", "KB", "MB", "GB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TB"


def _count_parameters(file: Path) -> int:
    """Count parameters from a file's header: its length in 8 bytes, then JSON with the shape of every tensor."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > file.stat().st_size:
            raise ValueError(f"{file.name} is not a safetensors file")
        header = json.loads(stream.read(length))
    tensors = [tensor for name, tensor in header.items() if name != "__metadata__"]
    whole = 8 + length + max((tensor["data_offsets"][1] for tensor in tensors), default=0)
    if whole > file.stat().st_size:
        raise ValueError(f"{file.name} has only {file.stat().st_size:,} of its {whole:,} bytes")
    return sum(math.prod(tensor["shape"]) for tensor in tensors)
