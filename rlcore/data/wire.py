"""Tensors as plain data for the wire: dtype name, shape, and one contiguous buffer that travels out of band.

With pickle protocol 5 the buffer is handed to the transport as it is; Ray's store then maps it into the reader
without a copy. No class of torch or numpy is pickled, so that both ends may have other versions of them.
bfloat16 and the 8-bit floats, which numpy does not know, travel as bytes like all others.
"""

from __future__ import annotations

import pickle
import warnings
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

Packed: TypeAlias = tuple[str, tuple[int, ...], Any]
"""(dtype name, shape, buffer)"""

# torch warns once per process about read-only buffers; columns of a Batch are never written in place, so spend it here.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.frombuffer(b"0", dtype=torch.uint8)


def pack(tensor: Tensor, protocol: int = 5) -> Packed:
    """Plain data for a tensor; the buffer is out of band from pickle protocol 5 on."""
    flat = tensor.detach().cpu().contiguous()
    data: Any = flat.reshape(-1).view(torch.uint8).numpy() if flat.numel() else np.zeros(0, dtype=np.uint8)
    dtype = str(flat.dtype).removeprefix("torch.")
    return dtype, tuple(flat.shape), pickle.PickleBuffer(data) if protocol >= 5 else data.tobytes()


def unpack(packed: Packed) -> Tensor:
    """The tensor, a view of the received buffer."""
    name, shape, data = packed
    dtype: torch.dtype = getattr(torch, name)
    if memoryview(data).nbytes == 0:
        return torch.zeros(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(shape)
