"""`Worker`: one rank of a role, inside a host. `rlcore.workers.base` has the base class with the shared methods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rlcore.types import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """Facts that a host passes to a worker's constructor."""

    role: str
    rank: int = 0
    world_size: int = 1
    device: str = "cpu"
    host: str = ""
    """Node name, for messages."""
    concurrent: bool = False
    """True if calls of the controller may overlap with what the worker does (runtime=ray). Otherwise a worker starts no
    thread that affects results, so that they are the same in every run."""


class Worker(Protocol):
    """One rank of one role, created with a `WorkerContext` and the options of its role.

    A group offers the methods marked with `rlcore.dispatch`.
    """

    mesh: Mesh
    """Read once, after construction; decides this rank's share and whether its results are collected."""

    def abort(self) -> None:
        """Cancel what a call waits for, if possible. Called from another thread, before `close`."""

    def close(self) -> None:
        """Free all resources. May be called twice."""
