"""Weight loader that runs in SGLang's scheduler processes.

SGLang calls `load` by the name passed to the engine as `custom_weight_loader`. weights.py is the sender.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


def load(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Load one bucket through the model's own loader, which maps names and splits tensors over ranks.

    Args:
        named_tensors: one pair. The first is JSON, {"path": …, "num_bytes": …, "entries": [[name, dtype, shape, offset]]};
            the second the bytes [num_bytes] uint8, empty if they are in the file `path`.
    """
    ((text, memory),) = named_tensors
    piece = json.loads(text)
    if piece["path"]:
        memory = torch.from_file(piece["path"], shared=True, size=piece["num_bytes"], dtype=torch.uint8)
    if piece["entries"]:
        model.load_weights(_tensors(piece["entries"], memory))
    if memory.is_cuda:
        torch.cuda.synchronize()  # the sender reuses this memory


def _tensors(entries: Sequence[tuple[str, str, list[int], int]], memory: Tensor) -> Iterator[tuple[str, Tensor]]:
    for name, dtype_name, shape, offset in entries:
        dtype: torch.dtype = getattr(torch, dtype_name)
        num_bytes = dtype.itemsize * torch.Size(shape).numel()
        yield name, memory[offset : offset + num_bytes].view(dtype).view(shape)
