"""Offload of device memory: the storages stay in place, only their bytes move to host memory and back."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class HostCopy:
    """Copy of tensors in host memory. Views of the tensors stay valid, because their storages are resized to zero."""

    def __init__(self, tensors: Iterable[Tensor], device: torch.device, *, zeros: Iterable[Tensor] = ()) -> None:
        """Copy `tensors` to host memory and empty their storages; `zeros` are those that hold zeros and are not copied."""
        self._storages: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}
        empty = {tensor.untyped_storage()._cdata for tensor in zeros}
        self._zeros: list[tuple[torch.UntypedStorage, int]] = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device != device or not storage.nbytes() or storage._cdata in self._storages:
                continue
            if storage._cdata in empty:
                self._zeros.append((storage, storage.nbytes()))
                storage.resize_(0)
            else:
                self._storages[storage._cdata] = storage, _bytes(storage).to("cpu", copy=True)
        for storage, _ in self._storages.values():
            storage.resize_(0)
        if device.type == "cuda":
            torch.cuda.empty_cache()

    def of(self, tensor: Tensor) -> Tensor:
        """Return the host copy of a tensor."""
        _, copy = self._storages[tensor.untyped_storage()._cdata]
        return copy.view(tensor.dtype).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def restore(self) -> None:
        """Copy the bytes back to the device."""
        for storage, copy in self._storages.values():
            storage.resize_(copy.numel())
            _bytes(storage).copy_(copy)
        for storage, size in self._zeros:
            storage.resize_(size)
            _bytes(storage).zero_()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
