"""The critic: values of states, trained by the algorithm's value loss."""

from __future__ import annotations

from rlcore.controller.dispatch import dispatch
from rlcore.data.batch import Batch
from rlcore.types import LossTerms, TokenOutputs
from rlcore.workers.model import TrainedWorker


class CriticWorker(TrainedWorker):
    """A model with a value head."""

    head = "value"

    @dispatch("dp", reads=("input_ids", "loss_mask"))
    def values(self, batch: Batch) -> Batch:
        """Column `values`, zero outside `loss_mask`."""
        return Batch.of(lengths=batch.lengths, tokens={"values": self.forward(batch).values})

    def terms(self, out: TokenOutputs, batch: Batch) -> LossTerms:
        return self.algorithm.value_loss(out, batch)  # type: ignore[no-any-return]
