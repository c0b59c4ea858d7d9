"""Workers that tests spawn; a module of its own, so that hosts can import it by name."""

import os
import time

from rlcore.controller.dispatch import dispatch
from rlcore.data.batch import Batch
from rlcore.types import Mean, Mesh
from rlcore.workers.base import Worker


class Echo(Worker):
    """Gives back what it gets."""

    @dispatch("dp")
    def echo(self, batch: Batch) -> Batch:
        return batch

    @dispatch("dp", reads=("input_ids",))
    def double(self, batch: Batch) -> Batch:
        assert batch.columns == ["input_ids"]
        return Batch.of(
            lengths=batch.lengths,
            tokens={"double": batch["input_ids"] * 2},
            rows={"seen_by": [self.context.rank] * len(batch)},
        )

    @dispatch("all")
    def who(self, greeting: str) -> str:
        return f"{greeting} {self.context.rank} of {self.context.world_size}"

    @dispatch("all")
    def pid(self) -> int:
        return os.getpid()

    @dispatch("rank_zero")
    def first(self) -> int:
        return self.context.rank

    @dispatch("scatter")
    def one_each(self, value: int) -> tuple[int, int]:
        return self.context.rank, value

    @dispatch("direct")
    def alone(self, value: int) -> tuple[int, int]:
        return self.context.rank, value

    @dispatch("dp_metrics")
    def count(self, batch: Batch) -> dict[str, Mean]:
        return {"rows": Mean(float(len(batch)), 1.0)}

    @dispatch("tests.workers:RoundRobin")
    def dealt(self, batch: Batch) -> Batch:
        return Batch.of(lengths=batch.lengths, rows={"seen_by": [self.context.rank] * len(batch)})

    @dispatch("all")
    def fail(self) -> None:
        raise ValueError("boom")

    @dispatch("all")
    def hang(self) -> None:
        time.sleep(60)

    @dispatch("direct")
    def die(self) -> None:
        os._exit(3)

    def not_marked(self) -> None:
        """Not for groups."""


class Twins(Echo):
    """Two ranks of each data-parallel share, as tensor parallelism has them; the first of each returns."""

    def __init__(self, context):
        super().__init__(context)
        self.mesh = Mesh(
            rank=context.rank,
            world_size=context.world_size,
            dp_rank=context.rank // 2,
            dp_size=context.world_size // 2,
            returns=context.rank % 2 == 0,
        )


class RoundRobin:
    """A custom dispatch mode in two functions: rows are dealt like cards."""

    def split(self, call, meshes):
        (batch,) = call.args
        return [type(call)((batch.take(range(mesh.rank, len(batch), len(meshes))),)) for mesh in meshes]

    def collect(self, outputs, meshes):
        return [output.fetch("seen_by").tolist() for output in outputs]
