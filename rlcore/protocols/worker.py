"""`Worker`: what a host carries. `rlcore.workers.base` has the base class with the methods that every role shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rlcore.types import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """What a host tells a worker about its place."""

    role: str
    rank: int = 0
    world_size: int = 1
    device: str = "cpu"
    host: str = ""
    """Node name, for messages."""


class Worker(Protocol):
    """One rank of one role, made with a `WorkerContext` and the options that its role was spawned with.

    Its methods marked with `rlcore.dispatch` are what a group offers.
    """

    mesh: Mesh
    """Asked once, after construction: who gets which share and whose results are collected."""

    def close(self) -> None:
        """Free everything; may be called twice."""
