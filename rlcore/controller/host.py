"""`Host`: one process bound to one device, with named workers.

The runtimes create hosts and send calls to them; this module does not know Ray. Colocated roles share a host.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from rlcore.controller.ref import BatchRef, Store
from rlcore.controller.weights import Broadcast, Inbox, meet, meeting_point
from rlcore.data.batch import Batch
from rlcore.protocols.dispatch import Call
from rlcore.protocols.worker import Worker, WorkerContext
from rlcore.registry import PluginSpec, load
from rlcore.types import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class HostInfo:
    """Position and device of a host."""

    pool: str
    rank: int
    world_size: int
    device: str
    """cpu or cuda:0."""
    threads: int = 1
    concurrent: bool = False
    """True if calls may overlap with what workers do (runtime=ray)."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Result of a call."""

    value: Any
    seconds: float
    """Time spent by the host."""
    failure: Failure | None = None
    begin: float = 0.0
    """Start of the call in seconds since 1970, by the clock of the host."""

    def check(self) -> None:
        """Raise the failure of the call, if any."""
        if self.failure is not None:
            self.failure.rise()


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception that is sent to the controller, with its traceback as text."""

    error: BaseException
    trace: str
    where: str

    def rise(self) -> None:
        """Raise the exception again, with a note on its origin."""
        self.error.add_note(f"in {self.where}\n{self.trace}")
        raise self.error


class Host:
    """The workers of one device, and the calls that reach them."""

    def __init__(self, info: HostInfo, store: Store) -> None:
        import torch

        torch.set_num_threads(info.threads)
        if info.device != "cpu":
            torch.cuda.set_device(info.device)  # collectives and meshes use the current device
        self.info = info
        self.node = socket.gethostname()
        self._store = store
        self._workers: dict[str, Worker] = {}
        self._outgoing: Iterator[tuple[str, Any]] | None = None
        self._inbox: Inbox | None = None
        self._meeting: Any = None
        self._broadcasts: dict[str, Broadcast] = {}
        """Route, such as "actor to rollout" -> its broadcast group."""

    def create(self, role: str, spec: PluginSpec, options: dict[str, Any]) -> Reply:
        """Create a worker of a role; the reply is its Mesh."""
        return self._guarded(f"{role}.__init__", lambda: self._create(role, spec, options))

    def call(self, role: str, method: str, call: Call) -> Reply:
        """Call a worker. Batch references become batches; resulting batches stay here, and references are returned."""
        return self._guarded(f"{role}.{method}", lambda: self._call(role, method, call))

    def poll(self, role: str, method: str, call: Call) -> Reply:
        """Call a worker, also while it executes another call."""
        return self.call(role, method, call)

    def keep(self, value: Any) -> Reply:
        """Copy batches that another host created, as they are lost when its process ends."""
        return self._guarded("copy", lambda: _each(value, lambda it: self._depart(self._arrive(it))))

    def hand_over(self, source: str, target: str, version: int, mix: float, sampled: int | None) -> Reply:
        """Pass the weights of one worker to another worker on this host, tensor by tensor."""
        return self._guarded(
            f"{target}.load_weights",
            lambda: self._load_weights(target, self._weights(source, sampled), version, mix),
        )

    def publish_weights(self, source: str, num_bytes: int, sampled: int | None) -> Reply:
        """Put the next bucket of a worker's weights in the store.

        The reply is [(name, reference)], empty on ranks other than 0, and whether more buckets follow. `sampled` is
        their version if an engine receives them.
        """
        return self._guarded(f"{source}.weights", lambda: self._publish_weights(source, num_bytes, sampled))

    def receive_weights(
        self, target: str, refs: list[tuple[str, Any]], version: int, timeout_s: float, mix: float = 1.0
    ) -> Reply:
        """Feed a bucket that another host published to a worker; the first one starts its loading."""
        return self._guarded(
            f"{target}.load_weights", lambda: self._receive_weights(target, refs, version, timeout_s, mix)
        )

    def end_weights(self) -> Reply:
        """Finish the loading after the last bucket."""
        return self._guarded("the end of the weights", lambda: self._end_weights(abort=False))

    def abandon_weights(self, target: str, version: int, timeout_s: float) -> Reply:
        """Abort an update that failed elsewhere: a worker that loads or has loaded this version loses its weights."""
        return self._guarded("the end of the weights", lambda: self._abandon_weights(target, version, timeout_s))

    def open_broadcast(self, address: str) -> Reply:
        """Open the rendezvous of a broadcast group as its rank 0, reachable at `address`, and reply with its port."""
        return self._guarded("broadcast of weights", lambda: self._open_broadcast(address))

    def join_broadcast(
        self, route: str, address: str, port: int, rank: int, world_size: int, timeout_s: float
    ) -> Reply:
        """Join the broadcast group for weights as this rank."""
        return self._guarded(
            "broadcast of weights", lambda: self._join_broadcast(route, address, port, rank, world_size, timeout_s)
        )

    def send_weights(self, route: str, source: str, num_bytes: int, sampled: int | None) -> Reply:
        """Broadcast a worker's weights; ranks outside the group only take part in gathering them."""
        return self._guarded(f"{source}.weights", lambda: self._send_weights(route, source, num_bytes, sampled))

    def take_weights(self, route: str, target: str, version: int, mix: float = 1.0) -> Reply:
        """Load the weights that are broadcast."""
        return self._guarded(f"{target}.load_weights", lambda: self._take_weights(route, target, version, mix))

    def join(self, init_method: str, timeout_s: float) -> Reply:
        """Join the process group of the pool."""
        return self._guarded("process group", lambda: self._join(init_method, timeout_s))

    def free_port(self) -> int:
        """Return a free port for the rendezvous of the process group."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])

    def memory(self) -> Reply:
        """Reply with the bytes in use on the device by all processes, or on a CPU by this process."""
        return self._guarded("memory", lambda: _used_bytes(self.info.device))

    def stack(self) -> str:
        """Return the stack of every thread of this process."""
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            return file.read()

    def abort(self) -> None:
        """Let workers cancel what a call waits for, so that it does not delay `close`."""
        for worker in list(self._workers.values()):
            worker.abort()

    def close(self) -> None:
        """Close all workers."""
        with ExitStack() as all_of_them:
            for worker in self._workers.values():
                all_of_them.callback(worker.close)
            self._workers.clear()

    def _create(self, role: str, spec: PluginSpec, options: dict[str, Any]) -> Mesh:
        worker_class: Any = load(spec, rank=self.info.rank, host=self.node)
        context = WorkerContext(
            role=role,
            rank=self.info.rank,
            world_size=self.info.world_size,
            device=self.info.device,
            host=self.node,
            concurrent=self.info.concurrent,
        )
        worker: Worker = worker_class(context, **options)
        self._workers[role] = worker
        return worker.mesh

    def _call(self, role: str, method: str, call: Call) -> Any:
        worker = self._workers[role]
        args = [self._arrive(value) for value in call.args]
        kwargs = {name: self._arrive(value) for name, value in call.kwargs.items()}
        result = getattr(worker, method)(*args, **kwargs)
        return _each(result, self._depart)

    def _depart(self, value: Any) -> Any:
        return BatchRef.publish(value, self._store) if isinstance(value, Batch) else value

    def _arrive(self, value: Any) -> Any:
        if isinstance(value, BatchRef):
            return BatchRef(value.row_lengths, value.near, value.far, self._store).local()
        return value

    def _weights(self, source: str, sampled: int | None) -> Iterator[tuple[str, Any]]:
        """Return the weights of a worker, and tell it their version if an engine will sample with them."""
        worker = self._any(source)
        if sampled is not None:
            worker.sampled_by_engine(sampled)
        weights: Iterator[tuple[str, Any]] = worker.weights()
        return weights

    def _publish_weights(self, source: str, num_bytes: int, sampled: int | None) -> tuple[list[tuple[str, Any]], bool]:
        if self._outgoing is None:
            self._outgoing = self._weights(source, sampled)
        refs, size = [], 0
        for name, tensor in self._outgoing:  # every rank iterates: gathering a shard is collective
            size += tensor.nbytes
            if self.info.rank == 0:
                refs.append((name, self._store.put([tensor.detach()])[0]))
            if size >= num_bytes:
                return refs, True
        self._outgoing = None
        return refs, False

    def _load_weights(self, target: str, weights: Iterator[tuple[str, Any]], version: int, mix: float) -> None:
        """Let a worker load weights; only a worker with a model takes `mix`."""
        self._any(target).load_weights(weights, version, **({} if mix == 1 else {"mix": mix}))

    def _receive_weights(
        self, target: str, refs: list[tuple[str, Any]], version: int, timeout_s: float, mix: float = 1.0
    ) -> None:
        if self._inbox is None:
            self._inbox = Inbox(lambda stream: self._load_weights(target, stream, version, mix), timeout_s)
        self._inbox.feed((name, self._store.get([ref])[0]) for name, ref in refs)

    def _abandon_weights(self, target: str, version: int, timeout_s: float) -> None:
        if target in self._workers:
            self._receive_weights(target, [], version, timeout_s)  # starts an update again that had succeeded
        self._end_weights(abort=True)

    def _end_weights(self, *, abort: bool) -> None:
        inbox, self._inbox, self._outgoing = self._inbox, None, None
        if inbox is not None:
            inbox.finish(abort=abort)

    def _open_broadcast(self, address: str) -> int:
        self._meeting = meeting_point(address)
        return int(self._meeting.port)

    def _join_broadcast(
        self, route: str, address: str, port: int, rank: int, world_size: int, timeout_s: float
    ) -> None:
        store = self._meeting if rank == 0 else meet(address, port, timeout_s)
        self._broadcasts[route] = Broadcast(
            store, rank=rank, world_size=world_size, device=self.info.device, timeout_s=timeout_s
        )

    def _send_weights(self, route: str, source: str, num_bytes: int, sampled: int | None) -> None:
        weights = self._weights(source, sampled)
        if route in self._broadcasts:
            self._broadcasts[route].send(weights, num_bytes)
            return
        for _ in weights:
            pass

    def _take_weights(self, route: str, target: str, version: int, mix: float) -> None:
        broadcast = self._broadcasts[route]
        try:
            self._load_weights(target, broadcast.receive(), version, mix)
        finally:
            broadcast.drain()

    def _any(self, role: str) -> Any:
        """Return a worker, untyped."""
        return self._workers[role]

    def _join(self, init_method: str, timeout_s: float) -> None:
        import torch.distributed as dist

        backend = "cpu:gloo,cuda:nccl" if self.info.device.startswith("cuda") else "gloo"
        dist.init_process_group(
            backend,
            init_method=init_method,
            rank=self.info.rank,
            world_size=self.info.world_size,
            timeout=timedelta(seconds=timeout_s),
        )

    def _guarded(self, what: str, action: Any) -> Reply:
        begin, start = time.time(), time.perf_counter()
        try:
            return Reply(action(), time.perf_counter() - start, begin=begin)
        except Exception as error:
            where = f"{what}, rank {self.info.rank} of pool '{self.info.pool}' on {self.node}, pid {os.getpid()}"
            failure = Failure(_portable(error), traceback.format_exc(), where)
            return Reply(None, time.perf_counter() - start, failure, begin)


def _each(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to a result, or to the items of a tuple of results."""
    return tuple(map(function, value)) if isinstance(value, tuple) else function(value)


def _used_bytes(device: str) -> int:
    if device == "cpu":
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return total - free


def _portable(error: Exception) -> Exception:
    """Return the error if it can be pickled, else a RuntimeError with its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception as reason:
        return RuntimeError(f"{type(error).__name__}: {error} (the original cannot be pickled: {reason})")
    return error
