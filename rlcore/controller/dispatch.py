"""The decorator `@dispatch` for worker methods that groups may call, and the built-in dispatch modes.

The decorator returns a descriptor that keeps the signature, so that editors, mypy and `help` show the original method.
On a worker it is the plain method; on a group (see group.py) the same name calls every rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast, overload

import numpy as np

from rlcore.controller.future import Future
from rlcore.controller.ref import BatchRef
from rlcore.data.batch import Batch
from rlcore.data.shares import UNIT, even_sizes, share_sizes
from rlcore.protocols.dispatch import Call
from rlcore.types import Mesh, Metrics, merge_metrics

P = ParamSpec("P")
R = TypeVar("R")


class BoundMethod(Generic[P, R]):
    """A dispatched method of one worker; a call runs the method itself."""

    def __init__(self, function: Callable[..., R], worker: object) -> None:
        self._call = functools.partial(function, worker)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._call(*args, **kwargs)

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Start the call and return at once; on a worker, return the finished call."""
        return Future.of(self._call(*args, **kwargs))


class DispatchedMethod(Generic[P, R]):
    """A worker method with its dispatch mode, the columns that it reads, and when it may be called."""

    def __init__(
        self,
        function: Callable[..., R],
        mode: str,
        reads: tuple[str, ...] | None,
        on_device: bool = True,
        concurrent: bool = False,
    ) -> None:
        functools.update_wrapper(cast(Any, self), function)
        self.function = function
        self.mode = mode
        self.reads = reads
        self.on_device = on_device
        self.concurrent = concurrent

    @overload
    def __get__(self, instance: None, owner: type) -> DispatchedMethod[P, R]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> BoundMethod[P, R]: ...
    def __get__(self, instance: object | None, owner: type) -> DispatchedMethod[P, R] | BoundMethod[P, R]:
        return self if instance is None else BoundMethod(self.function, instance)


def dispatch(
    mode: str, *, reads: Sequence[str] | None = None, on_device: bool = True, concurrent: bool = False
) -> Callable[[Callable[Concatenate[Any, P], R]], DispatchedMethod[P, R]]:
    """Let groups call a worker method with this dispatch mode.

    Args:
        mode: name of a `dispatch` plugin: all, dp, dp_metrics, or one of your own.
        reads: columns that are sent to the method; None sends all.
        on_device: whether the method needs the device; if False, it may be called while the worker is offloaded.
        concurrent: with runtime=ray, run the method in another thread, also while the worker executes another call.

    Example:
        >>> class Echo(Worker):
        ...     @dispatch("dp", reads=["input_ids"])
        ...     def echo(self, batch: Batch) -> Batch:
        ...         return batch
    """
    columns = None if reads is None else tuple(reads)
    return lambda function: DispatchedMethod(function, mode, columns, on_device, concurrent)


class All:
    """Sends the same arguments to every rank; returns a list of results in rank order."""

    def split(self, call: Call, meshes: Sequence[Mesh]) -> Sequence[Call | None]:
        return [call] * len(meshes)

    def collect(self, outputs: Sequence[Any], meshes: Sequence[Mesh]) -> Any:
        return list(outputs)


class DataParallel:
    """Splits batches by rows over the data-parallel axis and sends all other arguments to every rank.

    Shares are as even as possible and may be empty; results are concatenated in row order, one per share. Rows with the
    same `unit_id` are in one share; the other batches of a call are split at the same rows.
    Without a batch among the arguments every rank gets the same call and the results are a list.
    """

    def split(self, call: Call, meshes: Sequence[Mesh]) -> Sequence[Call | None]:
        dp_size = meshes[0].dp_size
        sizes = _sizes({name: value for name, value in _named(call) if isinstance(value, (Batch, BatchRef))}, dp_size)

        def shares_of(value: Any) -> Sequence[Any]:
            return value.split(sizes) if isinstance(value, (Batch, BatchRef)) else [value] * dp_size

        shares = [shares_of(value) for value in call.args]
        named = {name: shares_of(value) for name, value in call.kwargs.items()}
        return [
            Call(tuple(share[mesh.dp_rank] for share in shares), {k: v[mesh.dp_rank] for k, v in named.items()})
            for mesh in meshes
        ]

    def collect(self, outputs: Sequence[Any], meshes: Sequence[Mesh]) -> Any:
        kept = [output for _, output in sorted(_returned(outputs, meshes), key=lambda pair: pair[0])]
        if kept and all(isinstance(output, BatchRef) for output in kept):
            return BatchRef.cat(kept)
        if kept and all(isinstance(output, Batch) for output in kept):
            return Batch.cat(kept)
        return kept


class DataParallelMetrics(DataParallel):
    """Splits like `dp`; merges the resulting metrics."""

    def collect(self, outputs: Sequence[Any], meshes: Sequence[Mesh]) -> Metrics:
        return merge_metrics([output for _, output in _returned(outputs, meshes)])


class PerEngine:
    """Sends each row of the first argument to the engine that its row column `engine` names.

    Engines without rows are not called. Without a batch, every rank gets the same call. Methods return None, or
    (samples or None, list): all samples are concatenated, and all lists. Those of an engine that fails are missing, if
    the group allows that; a call of another mode is repeated without it.
    """

    def split(self, call: Call, meshes: Sequence[Mesh]) -> Sequence[Call | None]:
        prompts = call.args[0]
        if not isinstance(prompts, (Batch, BatchRef)):
            return [call] * len(meshes)
        engines = prompts.fetch("engine").numpy()
        rows = [np.flatnonzero(engines == mesh.dp_rank) for mesh in meshes]
        prompts = prompts.drop("engine")
        return [Call((prompts.take(own), *call.args[1:]), call.kwargs) if len(own) else None for own in rows]

    def collect(self, outputs: Sequence[Any], meshes: Sequence[Mesh]) -> Any:
        returned = [output for _, output in _returned(outputs, meshes) if output is not None]
        if not returned:
            return None
        samples = [samples for samples, _ in returned if samples is not None]
        return BatchRef.cat(samples) if samples else None, [item for _, items in returned for item in items]


def _sizes(batches: Mapping[str, Any], dp_size: int) -> Sequence[int]:
    """Return the rows of each share, which are the same for all batches of a call."""
    rows = {name: len(batch) for name, batch in batches.items()}
    if len(set(rows.values())) > 1:
        raise ValueError(f"dp: batches with different numbers of rows cannot be split together: {rows}")
    by_unit = {tuple(share_sizes(batch.unit_sizes(), dp_size)) for batch in batches.values() if UNIT in batch}
    if len(by_unit) > 1:
        raise ValueError(f"dp: batches with different units cannot be split together: {', '.join(rows)}")
    return by_unit.pop() if by_unit else even_sizes(next(iter(rows.values()), 0), dp_size)


def _returned(outputs: Sequence[Any], meshes: Sequence[Mesh]) -> list[tuple[int, Any]]:
    return [(mesh.dp_rank, output) for mesh, output in zip(meshes, outputs) if mesh.returns]


def _named(call: Call) -> list[tuple[str, Any]]:
    return [(f"{i + 1}", value) for i, value in enumerate(call.args)] + list(call.kwargs.items())
