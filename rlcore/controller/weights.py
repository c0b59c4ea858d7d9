"""Transfer of weights between hosts in buckets: the parts of transfer.py that run next to the workers.

A bucket in the store ends with the tensor that fills it; a tensor larger than a bucket is broadcast alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from rlcore.controller.network import address_toward
from rlcore.errors import DeadlineExceeded, InfrastructureError

BUCKET_BYTES = 256 * 2**20
_ALIGNMENT = 16
"""Alignment of tensors in a bucket, so that its bytes can be viewed as any dtype."""
Named = Iterator[tuple[str, Tensor]]


class Inbox:
    """Feeds a worker's `load_weights`, which reads one stream in a thread, from calls with one bucket each."""

    def __init__(self, load: Callable[[Named], None], timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._buckets: queue.SimpleQueue[Iterable[tuple[str, Tensor]] | None] = queue.SimpleQueue()
        self._asks: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """True when the reader wants a bucket; False when it has ended."""
        self._aborted = self._ended = False
        self._error: Exception | None = None
        threading.Thread(target=self._run, args=(load,), name="weights", daemon=True).start()
        self._wait()

    def feed(self, bucket: Iterable[tuple[str, Tensor]]) -> None:
        """Pass a bucket to the reader and return when it has been read; raise any error of the worker."""
        if not self._ended:  # otherwise the worker ended early without an error and does not need the rest
            self._buckets.put(bucket)
            self._wait()

    def finish(self, *, abort: bool = False) -> None:
        """End the stream; with `abort`, raise an error in the worker, because the rest of the weights is lost."""
        self._aborted = abort
        if not self._ended:
            self._buckets.put(None)
            self._wait()

    def _run(self, load: Callable[[Named], None]) -> None:
        try:
            load(self._stream())
        except Exception as error:
            self._error = error
        self._asks.put(False)

    def _stream(self) -> Named:
        while True:
            self._asks.put(True)
            try:
                bucket = self._buckets.get(timeout=self._timeout_s)
            except queue.Empty:
                raise DeadlineExceeded(f"no more weights arrived within {self._timeout_s:g} s") from None
            if bucket is None:
                if self._aborted:
                    raise InfrastructureError("weight update is incomplete: it was aborted")
                return
            yield from bucket

    def _wait(self) -> None:
        try:
            self._ended = not self._asks.get(timeout=self._timeout_s)
        except queue.Empty:
            raise DeadlineExceeded(f"a bucket of weights was not read within {self._timeout_s:g} s") from None
        if self._error is not None and not self._aborted:
            raise self._error


class Broadcast:
    """A process group in addition to the default one, in which rank 0 sends weights to the others.

    The header of a bucket goes through the store of the group, its bytes through a broadcast.
    """

    def __init__(self, store: Any, *, rank: int, world_size: int, device: str, timeout_s: float) -> None:
        dist: Any = torch.distributed
        self._store, self._is_sender = store, rank == 0
        store.set(f"device/{rank}", device)
        devices = [store.get(f"device/{it}").decode() for it in range(world_size)]
        timeout = timedelta(seconds=timeout_s)
        store.set_timeout(timeout)
        prefixed = dist.PrefixStore("group", store)
        self._group: Any
        if all(it.startswith("cuda") for it in devices):
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group, self._device = dist.ProcessGroupNCCL(prefixed, rank, world_size, options), device
        else:
            options = _gloo_options(store.host, timeout)
            self._group, self._device = dist.ProcessGroupGloo(prefixed, rank, world_size, options), "cpu"
        self._options = dist.BroadcastOptions()
        self._options.rootRank = self._options.rootTensor = 0
        self._buffer = torch.empty(0, dtype=torch.uint8, device=self._device)
        self._number = self._first = 0
        self._is_over = True

    def send(self, weights: Named, num_bytes: int) -> None:
        """Send all weights in buckets of this size; if reading them fails, notify the others."""
        for number in range(self._first, self._number):  # every receiver has confirmed these
            self._store.delete_key(f"bucket/{number}")
        self._first = self._number
        try:
            self._send_all(weights, num_bytes)
        except Exception as error:
            with contextlib.suppress(RuntimeError):  # report the first error
                self._announce({"failed": f"{type(error).__name__}: {error}".partition("\n")[0]})
            raise
        self._announce({"end": True})

    def receive(self) -> Named:
        """Return all weights that are sent; each tensor is valid until the next one is requested."""
        self._is_over = False  # before the first is requested, so that `drain` also receives for a reader that fails
        return self._rest()

    def drain(self) -> None:
        """Receive and discard the rest, so that the other ranks get theirs."""
        with contextlib.suppress(RuntimeError):  # the error of this rank has already been raised
            for _ in self._rest():
                pass

    def _send_all(self, weights: Named, num_bytes: int) -> None:
        held: list[tuple[str, str, list[int]]] = []
        used = 0
        for name, tensor in weights:
            size = _padded(tensor.nbytes)
            if held and used + size > num_bytes:
                self._send_bucket(held, used)
                held, used = [], 0
            self._make_room(max(size, num_bytes))
            self._buffer[used : used + tensor.nbytes] = _bytes_of(tensor)
            held.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)))
            used += size
        self._send_bucket(held, used)

    def _send_bucket(self, held: list[tuple[str, str, list[int]]], used: int) -> None:
        self._announce({"tensors": held, "bytes": used})
        self._broadcast(used)

    def _rest(self) -> Named:
        while not self._is_over:
            header = json.loads(self._store.get(f"bucket/{self._number}"))
            self._number += 1
            self._is_over = "bytes" not in header
            if "failed" in header:
                raise InfrastructureError(f"weight update is incomplete: {header['failed']}")
            if self._is_over:
                return
            self._make_room(header["bytes"])
            self._broadcast(header["bytes"])
            yield from self._cut(header["tensors"])

    def _cut(self, held: list[tuple[str, str, list[int]]]) -> Named:
        start = 0
        for name, dtype_name, shape in held:
            dtype: torch.dtype = getattr(torch, dtype_name)
            size = dtype.itemsize * torch.Size(shape).numel()
            yield name, self._buffer[start : start + size].view(dtype).view(shape)
            start += _padded(size)

    def _broadcast(self, size: int) -> None:
        if not size:
            return
        self._group.broadcast([self._buffer[:size]], self._options).wait()
        if self._device != "cpu":
            torch.cuda.synchronize()

    def _announce(self, header: dict[str, Any]) -> None:
        self._store.set(f"bucket/{self._number}", json.dumps(header))
        self._number += 1

    def _make_room(self, size: int) -> None:
        """Enlarge the buffer if needed, while it is empty."""
        if len(self._buffer) < size:
            self._buffer = torch.empty(size, dtype=torch.uint8, device=self._device)


def _gloo_options(meeting_address: str, timeout: timedelta) -> Any:
    """Return options for a group that may extend beyond the pool of this process.

    A pool on one node uses `lo`, while the weights may go to another machine. So gloo listens at the address from which
    this machine reaches the rendezvous.
    """
    gloo: Any = torch.distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    names = os.environ.get("GLOO_SOCKET_IFNAME", "lo").split(",")
    if names == ["lo"]:
        options._devices = [gloo.create_device(hostname=address_toward(meeting_address))]
    else:
        options._devices = [gloo.create_device(interface=name) for name in names]
    return options


def meeting_point(address: str) -> Any:
    """Create a store for a rendezvous in this process, reachable at `address` and a free port, its `port`."""
    dist: Any = torch.distributed
    return dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)


def meet(address: str, port: int, timeout_s: float) -> Any:
    """Connect to the store of another process."""
    dist: Any = torch.distributed
    return dist.TCPStore(address, port, timeout=timedelta(seconds=timeout_s))


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
