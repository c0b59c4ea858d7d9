"""Workers for tests, in a separate module so that hosts can import it by name."""

import os
import signal
import time

import torch

from rlcore.algorithms.grpo import GRPOConfig
from rlcore.backends.local import LocalConfig
from rlcore.controller.dispatch import dispatch
from rlcore.controller.group import spawn
from rlcore.data.batch import Batch
from rlcore.protocols.backend import ModelConfig, OptimizerConfig
from rlcore.registry import resolve
from rlcore.types import Mean, Mesh
from rlcore.workers.base import Worker
from rlcore.workers.model import ModelOptions, TrainedWorker


class Echo(Worker):
    """Worker that returns its arguments."""

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

    @dispatch("dp", reads=("input_ids",))
    def seen(self, batch: Batch) -> Batch:
        return Batch.of(lengths=batch.lengths, rows={"seen_by": [self.context.rank] * len(batch)})

    @dispatch("all")
    def who(self, greeting: str) -> str:
        return f"{greeting} {self.context.rank} of {self.context.world_size}"

    @dispatch("all")
    def pid(self) -> int:
        return os.getpid()

    @dispatch("tests.workers:RankZero")
    def first(self) -> int:
        return self.context.rank

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

    @dispatch("all")
    def nap(self, seconds: list[float]) -> None:
        time.sleep(seconds[self.context.rank])

    @dispatch("all")
    def die(self, rank: int) -> None:
        if self.context.rank == rank:
            os._exit(3)

    def not_marked(self) -> None:
        """Method that groups do not call."""


class SlowToStart(Echo):
    """Worker whose creation takes a minute, like that of an engine that compiles."""

    def __init__(self, context):
        super().__init__(context)
        time.sleep(60)


class Twins(Echo):
    """Worker with two ranks per data-parallel share, as in tensor parallelism; the first of each returns."""

    def __init__(self, context):
        super().__init__(context)
        self.mesh = Mesh(
            rank=context.rank,
            world_size=context.world_size,
            dp_rank=context.rank // 2,
            dp_size=context.world_size // 2,
            returns=context.rank % 2 == 0,
        )


def some_weights(scale):
    """Return weights of several dtypes and shapes: empty, a scalar, and one larger than the tests' buckets."""
    return {
        "a": torch.arange(7) * scale,
        "half": (torch.arange(15).view(3, 5) * scale).to(torch.bfloat16),
        "empty": torch.zeros(0, 3),
        "large": torch.arange(4096.0).view(64, 64) * scale,
        "one": torch.tensor(0.5 * scale),
        **{f"layer.{i}": torch.full((10, 10), float(i)) * scale for i in range(20)},
    }


class Giver(Worker):
    """Worker that sends weights; all ranks iterate over them together."""

    def __init__(self, context):
        super().__init__(context)
        self.scale, self.fails_at, self.num_walks = 1, "", 0

    @dispatch("all")
    def become(self, scale: int, fails_at: str = "") -> None:
        self.scale, self.fails_at = scale, fails_at

    @dispatch("all")
    def walks(self) -> int:
        return self.num_walks

    def weights(self):
        for name, tensor in some_weights(self.scale).items():
            if name == self.fails_at:
                raise ValueError("the source fails")
            yield name, tensor
        self.num_walks += 1


class Taker(Worker):
    """Worker that receives weights and reports whether the last load was complete."""

    def __init__(self, context):
        super().__init__(context)
        self.version, self.held, self.is_whole, self.fails_at = 0, {}, True, ""

    @dispatch("all")
    def fail_at(self, name: str, rank: int = 1) -> None:
        self.fails_at = name if self.context.rank == rank else ""

    @dispatch("all")
    def state(self) -> tuple[int, bool, bool]:
        """Return the version, whether the load was complete, and whether it equals `some_weights(version)` exactly."""
        wanted = some_weights(self.version)
        same = list(self.held) == list(wanted) and all(
            tensor.dtype == self.held[name].dtype and torch.equal(tensor, self.held[name])
            for name, tensor in wanted.items()
        )
        return self.version, self.is_whole, same

    def load_weights(self, weights, version: int) -> None:
        self.is_whole = False
        held = {}
        for name, tensor in weights:
            if name == self.fails_at:
                raise ValueError("the target fails")
            if self.fails_at == f"die at {name}":
                os.kill(os.getpid(), signal.SIGKILL)
            held[name] = tensor.clone()  # borrowed
        if self.fails_at == "the end":
            raise ValueError("the target fails")
        self.held, self.version, self.is_whole = held, version, True


class RankZero:
    """Custom dispatch mode that calls only rank 0."""

    def split(self, call, meshes):
        return [call, *[None] * (len(meshes) - 1)]

    def collect(self, outputs, meshes):
        return outputs[0]


class RoundRobin:
    """Custom dispatch mode that assigns rows to ranks in turn."""

    def split(self, call, meshes):
        (batch,) = call.args
        return [type(call)((batch.take(range(mesh.rank, len(batch), len(meshes))),)) for mesh in meshes]

    def collect(self, outputs, meshes):
        return [output.fetch("seen_by").tolist() for output in outputs]


def model_group(worker, runtime, pool, path):
    """Spawn workers with a model; a trained one learns with GRPO."""
    options = ModelOptions(
        backend=resolve("backend", "local").spec,
        backend_config=LocalConfig(),
        model=ModelConfig(path=path),
        optimizer=OptimizerConfig(),
        algorithm=resolve("algorithm", "grpo").spec,
        algorithm_config=GRPOConfig(),
        loss="loss" if issubclass(worker, TrainedWorker) else "",
        temperature=1.0,
        total_steps=1,
        seed=0,
    )
    return spawn(worker, runtime, role=worker.__name__, pool=pool, options={"options": options})
