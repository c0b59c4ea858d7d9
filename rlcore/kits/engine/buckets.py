"""Weights in files, for an engine in another process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor

from rlcore.errors import InfrastructureError


def buckets(weights: Iterator[tuple[str, Tensor]], num_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Copy the weights to the CPU in buckets of at most `num_bytes`; a larger tensor gets its own bucket."""
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights:
        if bucket and size + tensor.nbytes > num_bytes:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor.to("cpu", copy=True).contiguous()  # copied, as the tensor is valid only in this iteration
        size += tensor.nbytes
    if bucket:
        yield bucket


@contextlib.contextmanager
def naming_directory(directory: str) -> Iterator[None]:
    """Convert errors of files in `rollout.weights_directory` to an InfrastructureError that names the setting."""
    from safetensors import SafetensorError

    try:
        yield
    except (FileNotFoundError, PermissionError, SafetensorError) as error:
        raise InfrastructureError(
            f"rollout.weights_directory={directory}: {error}\n"
            "Type another  rollout.weights_directory , or  rollout.bucket_mb=16  if it is full"
        ) from error
