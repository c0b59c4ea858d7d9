"""The device's memory, given to the rollout and taken back: storages keep their places, only their bytes move."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class HostCopy:
    """The bytes of some tensors in host memory; views of them stay valid, as the storages themselves are emptied."""

    def __init__(self, tensors: Iterable[Tensor], device: torch.device) -> None:
        self._storages: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device == device and storage.nbytes() and storage._cdata not in self._storages:
                self._storages[storage._cdata] = storage, _bytes(storage).to("cpu", copy=True)
        for storage, _ in self._storages.values():
            storage.resize_(0)
        if device.type == "cuda":
            torch.cuda.empty_cache()

    def of(self, tensor: Tensor) -> Tensor:
        """A tensor as it was, in host memory."""
        _, copy = self._storages[tensor.untyped_storage()._cdata]
        return copy.view(tensor.dtype).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def restore(self) -> None:
        """Bring the bytes back."""
        for storage, copy in self._storages.values():
            storage.resize_(copy.numel())
            _bytes(storage).copy_(copy)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
