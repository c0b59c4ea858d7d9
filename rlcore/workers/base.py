"""`Worker`: the base class of all workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from rlcore.controller.dispatch import dispatch
from rlcore.data.batch import Batch
from rlcore.protocols.algorithm import RoleSpec
from rlcore.protocols.worker import WorkerContext
from rlcore.types import Mesh
from rlcore.workers.plan import PoolFacts, RoleMemory, RunPlan


class Worker:
    """One rank of one role.

    To write a worker, subclass this, return its options from `options_of` and take them as keyword arguments after the
    context, and decorate methods that a group may call with `@dispatch`.
    """

    default_loss: ClassVar[str] = ""
    """Default of `RoleSpec.loss`."""
    default_weights_from: ClassVar[str] = ""
    """Default of `RoleSpec.weights_from`."""
    updated_every_step: ClassVar[bool] = False
    """True if the role receives new weights after every step, like a rollout."""
    reads_text: ClassVar[bool] = False
    """True if the role's model has a tokenizer of its own."""

    @classmethod
    def options_of(cls, plan: RunPlan, role: str) -> dict[str, Any]:
        """Return the keyword arguments of a worker of this role; plain data, because they travel to the hosts."""
        return {}

    @classmethod
    def check(cls, plan: RunPlan, role: str) -> None:
        """Refuse a plan that workers of this role cannot run.

        Raises:
            UserError: with what to type.
        """

    @classmethod
    def data_parallel(cls, plan: RunPlan, role: str, pool: PoolFacts) -> int:
        """Return the number of shares that a batch is split into.

        Raises:
            UserError: the model cannot run on this pool.
        """
        return pool.num_devices

    @classmethod
    def memory(cls, plan: RunPlan, role: str, pool: PoolFacts) -> RoleMemory:
        """Estimate the memory of one worker.

        Raises:
            UserError: the model cannot run on this pool.
        """
        return RoleMemory()

    @classmethod
    def has_state(cls, spec: RoleSpec) -> bool:
        """Return whether checkpoints contain this role."""
        return cls.save_to is not Worker.save_to

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self.mesh = Mesh(
            rank=context.rank, world_size=context.world_size, dp_rank=context.rank, dp_size=context.world_size
        )

    @property
    def dp_size(self) -> int:
        """Number of shares that the rows of a batch are split into."""
        return self.mesh.dp_size

    @dispatch("dp", on_device=False)
    def apply(self, /, function: Callable[..., Batch], batch: Batch, **options: Any) -> Batch:
        """Run a pure module-level function on the rows where they are stored; it returns new columns for these rows."""
        return function(batch, **options)

    @dispatch("all")
    def save(self, directory: str, wait: bool = True) -> bool:
        """Write the state for an exact resume to directory/role; each rank writes its share.

        Without `wait` it may return True while it is still writing; `finish_save` waits for that.
        """
        target = Path(directory) / self.context.role
        target.mkdir(parents=True, exist_ok=True)
        return self.save_to(target, wait)

    @dispatch("all", on_device=False)
    def finish_save(self) -> None:
        """Wait for a `save` that is still writing."""

    @dispatch("all", on_device=False)
    def saved(self, directory: str) -> dict[str, int]:
        """Return the names and sizes of files that this node sees in directory/role after all ranks have saved."""
        target = Path(directory) / self.context.role
        return {str(it.relative_to(target)): it.stat().st_size for it in target.rglob("*") if it.is_file()}

    @dispatch("all")
    def load(self, directory: str) -> None:
        """Load the state that `save` wrote."""
        self.load_from(Path(directory) / self.context.role)

    def save_to(self, directory: Path, wait: bool) -> bool:
        """Write the worker's state, if it has any; return whether it is still writing."""
        return False

    def load_from(self, directory: Path) -> None:
        """Load the state that `save_to` wrote."""

    def sampled_by_engine(self, version: int) -> None:
        """Note that an engine receives the worker's weights as this version; called by the host before `weights`."""

    def abort(self) -> None:
        """Cancel what a call waits for, if possible; called from another thread before the host is closed."""

    def close(self) -> None:
        """Free everything; may be called twice."""
