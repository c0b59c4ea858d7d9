"""Workers for the benchmarks; a module of its own, so that hosts can import it by name."""

import io
from typing import Any

import ray
import torch

from rlcore import Batch, dispatch
from rlcore.workers.base import Worker


class Echo(Worker):
    """Gives back what it gets, as new columns."""

    @dispatch("dp")
    def echo(self, batch: Batch) -> Batch:
        """Every column under another name, so that nothing can be left where it was."""
        tokens = {f"{name}_back": batch[name] for name in batch.columns}
        return Batch.of(lengths=batch.lengths, tokens=tokens)

    @dispatch("dp")
    def log_probs(self, batch: Batch) -> Batch:
        """A column per token, as a policy writes it."""
        return Batch.of(lengths=batch.lengths, tokens={"log_probs": torch.zeros(batch.num_tokens)})

    @dispatch("all")
    def noop(self) -> None:
        """Nothing."""


class PlainActor:
    """The usual way: a padded dict of tensors, pickled by torch in both directions."""

    def echo(self, data: bytes) -> bytes:
        tensors: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True)
        return saved(tensors)

    def put_back(self, arrays: list[Any]) -> list[Any]:
        """Arrays of a list of references, in a list of new ones: what Ray itself needs for the same bytes."""
        return [ray.put(array) for array in ray.get(arrays, timeout=120)]

    def noop(self) -> None:
        """Nothing."""


def saved(tensors: dict[str, Any]) -> bytes:
    """`torch.save` into bytes."""
    buffer = io.BytesIO()
    torch.save(tensors, buffer)
    return buffer.getvalue()
