"""Models with a value head: the critic, trained by the algorithm's value loss, and a frozen reward model."""

from __future__ import annotations

from typing import Any

import torch

from rlcore.controller.dispatch import dispatch
from rlcore.data.batch import Batch
from rlcore.registry import Resolved, resolve
from rlcore.workers.model import ModelWorker, TrainedWorker
from rlcore.workers.plan import RunPlan


class CriticWorker(TrainedWorker):
    """A model with a value head."""

    head = "value"
    default_loss = "value_loss"

    @dispatch("dp", reads=("input_ids", "loss_mask"))
    def values(self, batch: Batch) -> Batch:
        """Compute the column `values`, zero outside `loss_mask`."""
        return Batch.of(lengths=batch.lengths, tokens={"values": self.forward(batch).values})


class RewardModelWorker(ModelWorker):
    """A frozen reward model, as trained by algorithm=reward_model of rlcore-algorithms."""

    head = "value"

    @classmethod
    def backend_of(cls, plan: RunPlan) -> tuple[Resolved, Any]:
        local = resolve("backend", "local")  # a reward model fits one device; only `local` can load its value head
        return local, local.object.Config()

    @dispatch("dp", reads=("input_ids", "loss_mask"))
    def scores(self, batch: Batch) -> Batch:
        """Compute the row column `model_score`, the value at the end of each sample."""
        ended = with_score_token(batch)
        values = self.forward(ended).values
        assert values is not None, "a value head has values"
        return Batch.of(lengths=batch.lengths, rows={"model_score": ended.per_row(values.to(ended.device))})


def with_score_token(batch: Batch) -> Batch:
    """Return the samples with their last token repeated; the copy is the only loss token.

    The value at token i is that of the state before it, so the value at the copy is that of the whole sample.
    """
    ends = batch.offsets()[1:] - 1
    ones = torch.ones(len(batch), dtype=torch.int64)
    times = torch.ones(batch.num_tokens, dtype=torch.int64).index_add(0, ends, ones)
    source = torch.arange(batch.num_tokens).repeat_interleave(times)
    lengths = batch.lengths + 1
    mask = torch.zeros(len(source), dtype=torch.bool)
    mask[lengths.cumsum(0) - 1] = True
    return Batch.of(
        lengths=lengths,
        tokens={"input_ids": batch["input_ids"][source], "loss_mask": mask},
        rows={"num_loss_tokens": ones},
    )
