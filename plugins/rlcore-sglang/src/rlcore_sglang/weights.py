"""Weight updates: pause the engine, send the weights bucket by bucket, set the version, continue.

Buckets go through memory that both sides map, a file in shared memory or GPU memory; or through a model directory that
SGLang loads. The version is set last, when all buckets have arrived. Until then, and after a failed update, it is
NO_VERSION, and a server stays paused, so that other clients, through a router or in a later run, are not served from an
incomplete update.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from rlcore.errors import InfrastructureError, RlcoreError
from rlcore.kits.engine.buckets import buckets, naming_directory
from rlcore_sglang.config import SGLangConfig

LOADER = "rlcore_sglang.loader.load"
NO_VERSION = "-1"
_ALIGNMENT = 16
_MB = 2**20


class Control(Protocol):
    """Interface of an engine for weight updates."""

    num_ranks: int
    """Number of ranks of the engine, each of which gets its own handle."""

    def control(self, action: str, **fields: Any) -> None:
        """Run one of SGLang's control actions; raise unless it reports success."""


def send(
    engine: Control,
    weights: Iterator[tuple[str, Tensor]],
    version: int,
    *,
    config: SGLangConfig,
    device: str,
    path: str,
    pause: str = "retract",
    resume: bool = True,
) -> None:
    """Replace all weights.

    Args:
        device: "cpu" sends through a file, which a server can also map; otherwise memory of this device is used.
        path: the model directory, for `weights=disk`.
        pause: see SGLangConfig.pause. The KV cache of the old weights is dropped, unless sequences paused in place still
            use it.
        resume: whether to continue sampling afterwards.
    """
    flush = pause != "in_place"
    engine.control("pause_generation", mode=pause)
    try:
        engine.control("update_weight_version", new_version=NO_VERSION, abort_all_requests=False)
        if config.weights == "disk":
            _through_directory(engine, weights, config, path, flush)
        else:
            _through_memory(engine, weights, config, device, flush)
        engine.control("update_weight_version", new_version=str(version), abort_all_requests=False)
    except BaseException:
        # Waiting requests must be answered. Requests paused in place must be retracted before they can be aborted.
        with contextlib.suppress(RlcoreError):
            for mode in ("retract", "abort"):
                engine.control("pause_generation", mode=mode)
            if not config.url:  # the engine has no other clients
                engine.control("continue_generation")
        raise
    if resume:
        engine.control("continue_generation")


def _through_memory(
    engine: Control, weights: Iterator[tuple[str, Tensor]], config: SGLangConfig, device: str, flush: bool
) -> None:
    _begin(engine)
    try:
        with _SharedFile(config.weights_directory) if device == "cpu" else _DeviceMemory(device) as memory:
            for entries in pieces(weights, config.bucket_mb * _MB, memory):
                _update(engine, memory.payloads(entries, engine.num_ranks), flush_cache=False)
            _update(engine, memory.payloads([], engine.num_ranks), flush_cache=flush)
    except BaseException:
        with contextlib.suppress(RlcoreError):  # keep the first error
            engine.control("end_weight_update")
        raise
    engine.control("end_weight_update")


def _begin(engine: Control) -> None:
    try:
        engine.control("begin_weight_update", selector="all")
    except InfrastructureError as error:
        if "already open" not in str(error):
            raise
        engine.control("end_weight_update")  # a killed run left an update unfinished
        engine.control("begin_weight_update", selector="all")


def _update(engine: Control, payloads: list[bytes], *, flush_cache: bool) -> None:
    fields = {"serialized_named_tensors": payloads, "load_format": LOADER, "flush_cache": flush_cache}
    engine.control("update_weights_from_tensor", **fields)


def _through_directory(
    engine: Control, weights: Iterator[tuple[str, Tensor]], config: SGLangConfig, path: str, flush: bool
) -> None:
    from safetensors.torch import save_file

    with (
        naming_directory(config.weights_directory),
        tempfile.TemporaryDirectory(prefix="rlcore-", dir=config.weights_directory) as directory,
    ):
        shutil.copy(Path(path) / "config.json", directory)
        for number, bucket in enumerate(buckets(weights, config.bucket_mb * _MB)):
            save_file(bucket, Path(directory) / f"model-{number:05d}.safetensors")
        engine.control("update_weights_from_disk", model_path=directory, flush_cache=flush)


Entry = tuple[str, str, list[int], int]
"""(name, dtype, shape, offset in bytes)"""


def pieces(weights: Iterator[tuple[str, Tensor]], limit: int, memory: _Memory) -> Iterator[list[Entry]]:
    """Fill `memory` with weights, at most `limit` bytes at a time, and yield the layout; a larger tensor goes alone.

    The contents of a bucket are valid until the next one is requested. Tensors are copied at once, as they are borrowed."""
    entries: list[Entry] = []
    used = 0
    for name, tensor in weights:
        offset = -(-used // _ALIGNMENT) * _ALIGNMENT
        if entries and offset + tensor.nbytes > limit:
            yield entries
            entries, offset = [], 0
        memory.reserve(offset + tensor.nbytes, limit)
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries.append((name, dtype, list(tensor.shape), offset))
        memory.view(dtype, list(tensor.shape), offset).copy_(tensor)
        used = offset + tensor.nbytes
    if entries:
        yield entries


class _Memory:
    """Growing buffer [n] uint8 on the CPU or a device."""

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self.bytes = torch.empty(0, dtype=torch.uint8, device=device)

    def __enter__(self) -> _Memory:
        return self

    def __exit__(self, *_: object) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8)

    def reserve(self, num_bytes: int, limit: int) -> None:
        """Ensure a size of at least `num_bytes`, doubling up to `limit`. Contents are kept."""
        if num_bytes > len(self.bytes):
            self.bytes = self._grown(max(num_bytes, min(limit, 2 * len(self.bytes))))

    def view(self, dtype_name: str, shape: list[int], offset: int) -> Tensor:
        dtype: torch.dtype = getattr(torch, dtype_name)
        num_bytes = dtype.itemsize * torch.Size(shape).numel()
        return self.bytes[offset : offset + num_bytes].view(dtype).view(shape)

    def payloads(self, entries: list[Entry], num_ranks: int) -> list[bytes]:
        """Return each rank's message: pickled as SGLang expects it, with the layout as JSON instead of a name."""
        raise NotImplementedError

    def _grown(self, num_bytes: int) -> Tensor:
        grown = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        grown[: len(self.bytes)].copy_(self.bytes)
        return grown


class _SharedFile(_Memory):
    """File in shared memory, mapped here and by the receivers."""

    def __init__(self, directory: str) -> None:
        super().__init__()
        self._directory = directory
        with naming_directory(directory):
            descriptor, self._path = tempfile.mkstemp(prefix="rlcore-", suffix=".weights", dir=directory)
        os.close(descriptor)

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        os.unlink(self._path)

    def payloads(self, entries: list[Entry], num_ranks: int) -> list[bytes]:
        layout = {"path": self._path, "num_bytes": len(self.bytes), "entries": entries}
        return [pickle.dumps([(json.dumps(layout), torch.empty(0, dtype=torch.uint8))])] * num_ranks

    def _grown(self, num_bytes: int) -> Tensor:
        """Allocate the space first, because writing to a mapping on a full disk kills the process."""
        with open(self._path, "r+b") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, num_bytes)
            except OSError as error:
                raise InfrastructureError(
                    f"rollout.weights_directory={self._directory} has no room for {num_bytes / 2**20:.0f} MB of weights:"
                    f" {error.strerror}\nType  rollout.bucket_mb=16   or another  rollout.weights_directory"
                ) from error
        return torch.from_file(self._path, shared=True, size=num_bytes, dtype=torch.uint8)


class _DeviceMemory(_Memory):
    """GPU memory that the schedulers map. Each rank needs its own handle, because handles are reference-counted."""

    def payloads(self, entries: list[Entry], num_ranks: int) -> list[bytes]:
        torch.cuda.synchronize(self._device)
        layout = json.dumps({"path": "", "num_bytes": len(self.bytes), "entries": entries})
        return [bytes(ForkingPickler.dumps([(layout, self.bytes)])) for _ in range(num_ranks)]
