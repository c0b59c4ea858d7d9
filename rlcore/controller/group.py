"""`spawn` creates all workers of one role and returns a group, which is called like one worker.

    actor = spawn(PolicyWorker, runtime, role="actor", pool="main", spec=spec, options={…})
    out = actor.log_probs(batch)                  # every rank, split and collected by the method's dispatch mode
    future = actor.log_probs.submit(batch)        # the same, without waiting

To a type checker the group is the worker class itself, so signatures, completion and go-to-definition are those of the
worker. A method that is not dispatched raises AttributeError before anything is sent.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar, cast

from rlcore.controller.dispatch import DispatchedMethod, PerEngine
from rlcore.controller.future import Future, Interrupt
from rlcore.controller.members import Members
from rlcore.controller.record import Record
from rlcore.controller.ref import BatchRef
from rlcore.controller.runtime import Runtime
from rlcore.data.batch import Batch
from rlcore.data.shares import UNIT
from rlcore.errors import did_you_mean
from rlcore.protocols.dispatch import Call, Dispatch
from rlcore.registry import PluginSpec, resolve
from rlcore.types import Mesh

W = TypeVar("W")


@dataclass(frozen=True, slots=True)
class _Declared:
    """Declaration of a method by `@dispatch`."""

    mode: Dispatch
    signature: inspect.Signature
    reads: Sequence[str] | None
    on_device: bool
    concurrent: bool
    doc: str | None


@cache
def _declared(method: DispatchedMethod[..., Any]) -> _Declared:
    mode: Dispatch = resolve("dispatch", method.mode).object()
    signature = inspect.signature(method.function)
    return _Declared(mode, signature, method.reads, method.on_device, method.concurrent, method.__doc__)


class GroupMethod:
    """One dispatched method of a group."""

    def __init__(self, group: Group, name: str, method: DispatchedMethod[..., Any]) -> None:
        self._group = group
        self._name = name
        self._method = _declared(method)
        self.__doc__ = self._method.doc

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.submit(*args, **kwargs).result()

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Start the call on every rank that the dispatch mode selects, and return at once."""
        self._method.signature.bind(None, *args, **kwargs)
        group = self._group
        if self._method.on_device and group.before_call is not None:
            group.before_call(group)
        ready = Call(
            tuple(self._depart(value) for value in args), {name: self._depart(value) for name, value in kwargs.items()}
        )
        ranks, meshes = group.ranks, group.meshes
        calls = self._method.mode.split(ready, meshes)
        group.record.num_bytes += sum(_num_bytes(call) for call in calls if call is not None)
        action = "poll" if self._method.concurrent else "call"
        submitted = time.time()
        with group.record.blocked() if group.runtime.inline else nullcontext():
            handles = {
                rank: group.runtime.submit(group.pool, rank, action, group.role, self._name, call)
                for rank, call in zip(ranks, calls)
                if call is not None
            }

        def collect(interrupt: Interrupt) -> Any:
            replies = self._wait(handles, submitted, interrupt)
            if len(replies) < len(handles) and not isinstance(self._method.mode, PerEngine):
                return self.submit(*args, **kwargs).result(interrupt)  # without the engines that failed
            return self._method.mode.collect([replies.get(rank) for rank in ranks], meshes)

        return Future(collect, lambda: group.runtime.done(list(handles.values())))

    def _depart(self, value: Any) -> Any:
        """Convert a Batch to a reference with only the columns that the method reads, and `unit_id`."""
        runtime = self._group.runtime
        if isinstance(value, Batch):
            value = BatchRef.publish(value, runtime.store)
        if not isinstance(value, BatchRef):
            return value
        reads = self._group.reads.get(self._name, self._method.reads)
        return value if reads is None else value.select(*reads, *([UNIT] if UNIT in value else []))

    def _wait(self, handles: Mapping[int, Any], submitted: float, interrupt: Interrupt) -> dict[int, Any]:
        """Return rank -> result, without engines that are left out because they failed."""
        group, record = self._group, self._group.record
        what = f"{group.role}.{self._name}"
        if record.on_wait:
            record.on_wait(what)
        waiting = submitted if group.runtime.inline else time.time()
        with record.blocked():
            replies = group.members.wait(handles, what, interrupt or record.while_waiting)
        record.ran(what, group.pool, replies, submitted, waiting)
        return {rank: self._arrive(reply.value) for rank, reply in replies.items()}

    def _arrive(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(self._arrive, value))
        if not isinstance(value, BatchRef):
            return value
        self._group.record.num_bytes += value.num_bytes
        return BatchRef(value.row_lengths, value.near, value.far, self._group.runtime.store)


def _num_bytes(call: Call) -> int:
    """Return the size of the batches of a call; its other arguments are small."""
    return sum(value.num_bytes for value in (*call.args, *call.kwargs.values()) if isinstance(value, BatchRef))


class Group:
    """All workers of one role."""

    def __init__(
        self,
        worker_class: type,
        runtime: Runtime,
        *,
        role: str,
        pool: str,
        meshes: Sequence[Mesh],
        reads: Mapping[str, Sequence[str]] = {},
        record: Record | None = None,
        before_call: Callable[[Group], None] | None = None,
        members: Members | None = None,
    ) -> None:
        """Create a handle on existing workers.

        Args:
            reads: method -> columns that are sent to it, instead of those of its `@dispatch`.
            record: where calls note what they took and moved.
            before_call: called before each call that needs the device.
            members: the ranks that are in use, by default all.
        """
        self.worker_class = worker_class
        self.runtime = runtime
        self.role = role
        self.pool = pool
        self.members = members or Members(runtime, role, pool, meshes)
        self.reads = reads
        self.record = record or Record()
        self.before_call = before_call

    def recording(self, record: Record, before_call: Callable[[Group], None] | None = None) -> Group:
        """Return a handle on the same workers whose calls are noted in `record`."""
        return Group(
            self.worker_class,
            self.runtime,
            role=self.role,
            pool=self.pool,
            meshes=self.meshes,
            reads=self.reads,
            record=record,
            before_call=before_call,
            members=self.members,
        )

    @property
    def meshes(self) -> Sequence[Mesh]:
        """Meshes of the ranks in use."""
        return self.members.meshes

    @property
    def ranks(self) -> Sequence[int]:
        """Ranks of the pool that are in use: all, without engines that failed."""
        return self.members.ranks

    @property
    def dp_size(self) -> int:
        """Number of shares that the rows of a batch are split into."""
        return self.meshes[0].dp_size

    def __getattr__(self, name: str) -> GroupMethod:
        method = inspect.getattr_static(self.worker_class, name, None)
        if not isinstance(method, DispatchedMethod):
            known = dispatched_methods(self.worker_class)
            what = "is not marked with @dispatch" if method is not None else "does not exist"
            raise AttributeError(
                f"{self.role}.{name} {what} in {self.worker_class.__name__}.{did_you_mean(name, known)}"
                f" Dispatched methods: {', '.join(known)}"
            )
        call = GroupMethod(self, name, method)
        self.__dict__[name] = call
        return call


def dispatched_methods(worker_class: type) -> list[str]:
    """Return the names of the methods that groups of this class offer."""
    members = {name: value for base in reversed(worker_class.__mro__) for name, value in vars(base).items()}
    return sorted(name for name, value in members.items() if isinstance(value, DispatchedMethod))


def spawn(
    worker_class: type[W],
    runtime: Runtime,
    *,
    role: str,
    pool: str,
    spec: PluginSpec | None = None,
    options: Mapping[str, Any] | None = None,
    reads: Mapping[str, Sequence[str]] | None = None,
) -> W:
    """Create one worker on every host of a pool and return their group.

    Args:
        spec: location from which workers import the class, by default its module and name.
        options: keyword arguments of the worker class in addition to its context.
        reads: method -> columns that are sent to it.
    """
    spec = spec or resolve("worker", worker_class).spec
    handles = [
        runtime.submit(pool, rank, "create", role, spec, dict(options or {})) for rank in range(runtime.pool_size(pool))
    ]
    replies = runtime.wait(handles, f"{role}.__init__", runtime.config.start_timeout_s, "start_timeout_s")
    meshes: list[Mesh] = [reply.value for reply in replies]
    return cast(W, Group(worker_class, runtime, role=role, pool=pool, meshes=meshes, reads=reads or {}))
