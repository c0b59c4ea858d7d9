"""The value head of a critic: one row on the last hidden state, always float32, in a file of its own."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

VALUE_HEAD, HEAD_FILE = "value_head.weight", "value_head.safetensors"


def initial_value_head(hidden_size: int, directory: Path, seed: int) -> Tensor:
    """Return the weight [1, D] that was saved with a model, or a random one that does not depend on the ranks."""
    if (trained := directory / HEAD_FILE).is_file():
        return load_file(trained)[VALUE_HEAD]
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(1, hidden_size).normal_(std=1.0 / (hidden_size + 1), generator=generator)
