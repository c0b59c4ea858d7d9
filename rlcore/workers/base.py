"""`Worker`: the base class with the methods that every role shares."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlcore.controller.dispatch import dispatch
from rlcore.data.batch import Batch
from rlcore.protocols.worker import WorkerContext
from rlcore.types import Mesh


class Worker:
    """One rank of one role.

    A worker of your own subclasses this, takes its options as keyword arguments after the context, and marks what a
    group may call with `@dispatch`.
    """

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self.mesh = Mesh(
            rank=context.rank, world_size=context.world_size, dp_rank=context.rank, dp_size=context.world_size
        )

    @property
    def dp_size(self) -> int:
        """Into how many shares the rows of a batch are split."""
        return self.mesh.dp_size

    @dispatch("dp", on_device=False)
    def apply(self, /, function: Callable[..., Batch], batch: Batch, **options: Any) -> Batch:
        """Run a pure function of a module on the rows where they lie; it returns new columns for the same rows."""
        return function(batch, **options)

    @dispatch("all")
    def save(self, directory: str, wait: bool = True) -> bool:
        """Write what an exact resume needs under directory/role, each rank its share.

        Without `wait` it may return True, while it still writes; `finish_save` waits for that.
        """
        target = Path(directory) / self.context.role
        target.mkdir(parents=True, exist_ok=True)
        return self.save_to(target, wait)

    @dispatch("all", on_device=False)
    def finish_save(self) -> None:
        """Wait for a `save` that still writes."""

    @dispatch("all", on_device=False)
    def saved(self, directory: str) -> dict[str, int]:
        """Names and sizes of what this rank's node sees in directory/role, asked when all ranks have saved."""
        target = Path(directory) / self.context.role
        return {str(it.relative_to(target)): it.stat().st_size for it in target.rglob("*") if it.is_file()}

    @dispatch("all")
    def load(self, directory: str) -> None:
        """The inverse of `save`."""
        self.load_from(Path(directory) / self.context.role)

    def save_to(self, directory: Path, wait: bool) -> bool:
        """Most workers have nothing to save."""
        return False

    def load_from(self, directory: Path) -> None:
        """The inverse of `save_to`."""

    def close(self) -> None:
        """Free everything; may be called twice."""
