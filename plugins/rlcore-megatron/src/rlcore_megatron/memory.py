"""The device's memory, given to the rollout and taken back: storages keep their places, only their bytes move."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class HostCopy:
    """The bytes of some tensors in host memory; views of them stay valid, as the storages themselves are emptied."""

    def __init__(self, tensors: Iterable[Tensor], device: torch.device, *, zeros: Iterable[Tensor] = ()) -> None:
        """`zeros` are those among `tensors` that hold nothing else, and are not copied."""
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
        """A tensor as it was, in host memory."""
        _, copy = self._storages[tensor.untyped_storage()._cdata]
        return copy.view(tensor.dtype).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def restore(self) -> None:
        """Bring the bytes back."""
        for storage, copy in self._storages.values():
            storage.resize_(copy.numel())
            _bytes(storage).copy_(copy)
        for storage, size in self._zeros:
            storage.resize_(size)
            _bytes(storage).zero_()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
