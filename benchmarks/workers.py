"""Workers for the benchmarks, in a separate module so that hosts can import it by name."""

import io
from typing import Any

import ray
import torch

from rlcore import Batch, dispatch
from rlcore.workers.base import Worker


class Echo(Worker):
    """Worker that returns its input as new columns."""

    @dispatch("dp")
    def echo(self, batch: Batch) -> Batch:
        """Return every column under another name, so that no column can stay where it was."""
        tokens = {f"{name}_back": batch[name] for name in batch.columns}
        return Batch.of(lengths=batch.lengths, tokens=tokens)

    @dispatch("dp")
    def log_probs(self, batch: Batch) -> Batch:
        """Return a column with one value per token, like a policy."""
        return Batch.of(lengths=batch.lengths, tokens={"log_probs": torch.zeros(batch.num_tokens)})

    @dispatch("all")
    def noop(self) -> None:
        """Do nothing."""


class PlainActor:
    """Baseline actor: a padded dict of tensors, serialized by torch in both directions."""

    def echo(self, data: bytes) -> bytes:
        tensors: dict[str, Any] = torch.load(io.BytesIO(data), weights_only=True)
        return saved(tensors)

    def put_back(self, arrays: list[Any]) -> list[Any]:
        """Return new references to copies of the arrays: the cost of the same bytes in bare Ray."""
        return [ray.put(array) for array in ray.get(arrays, timeout=120)]

    def noop(self) -> None:
        """Do nothing."""


def saved(tensors: dict[str, Any]) -> bytes:
    """Return the tensors as the bytes of `torch.save`."""
    buffer = io.BytesIO()
    torch.save(tensors, buffer)
    return buffer.getvalue()
