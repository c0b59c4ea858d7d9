"""Serialization of tensors as plain data: dtype name, shape and one contiguous buffer that is sent out of band.

With pickle protocol 5 the buffer is passed to the transport without a copy; Ray's store maps it into the reader. No
class of torch or numpy is pickled, so both ends may have different versions. bfloat16 and the 8-bit floats, which numpy
does not support, are sent as bytes like all others.
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

# torch warns once per process about read-only buffers; columns of a Batch are never written in place, so trigger and
# ignore the warning here.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.frombuffer(b"0", dtype=torch.uint8)


def pack(tensor: Tensor, protocol: int = 5) -> Packed:
    """Convert a tensor to plain data; from pickle protocol 5 on the buffer is out of band."""
    flat = tensor.detach().cpu().contiguous()
    data: Any = flat.reshape(-1).view(torch.uint8).numpy() if flat.numel() else np.zeros(0, dtype=np.uint8)
    dtype = str(flat.dtype).removeprefix("torch.")
    return dtype, tuple(flat.shape), pickle.PickleBuffer(data) if protocol >= 5 else data.tobytes()


def unpack(packed: Packed) -> Tensor:
    """Return the tensor as a view of the received buffer."""
    name, shape, data = packed
    dtype: torch.dtype = getattr(torch, name)
    if memoryview(data).nbytes == 0:
        return torch.zeros(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).reshape(shape)
