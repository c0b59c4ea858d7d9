"""`PackedBackend`: base class of backends that run a model over micro-batches of packed samples.

A subclass creates the model, runs micro-batches (`run`), applies gradients (`apply_gradients`), and reads and writes
weights and checkpoints. The base class plans the micro-batches and computes everything that the `Backend` protocol
defines for all models. Shapes: T tokens of a batch or micro-batch, n tokens under the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.data.batch import Batch
from rlcore.data.packing import plan_micro_batches
from rlcore.kits.backend.optimizer import lr_at
from rlcore.kits.backend.update import WeightUpdate
from rlcore.protocols.backend import BackendContext, ModelConfig, OptimizerConfig
from rlcore.types import LossFunction, Mean, Mesh, Metrics, TokenOutputs, merge_metrics

UseOutputs = Callable[[int, TokenOutputs], Tensor]
"""Called once with the index and the outputs [T] of each micro-batch; returns a scalar, whose gradients are summed."""


class PackedBackend:
    """One rank of one model."""

    mesh: Mesh

    def __init__(self, *, model: ModelConfig, optimizer: OptimizerConfig, context: BackendContext) -> None:
        self.model_config, self.optimizer_config, self.context = model, optimizer, context
        self.device = torch.device(context.device)
        self.num_steps = 0
        """Optimizer steps so far."""
        self.weight_update = WeightUpdate()
        self.max_tokens = model.max_tokens_per_device
        """Maximum number of tokens in a micro-batch; a multiple of the setting if several devices share the tokens."""
        self.output_names = ("log_probs", "entropy") if context.head == "token" else ("values",)

    def run(self, micro_batches: Sequence[Batch], use: UseOutputs, *, temperature: float, backward: bool) -> None:
        """Compute the outputs of each micro-batch and pass them to `use`; with `backward`, add up the gradients.

        Micro-batches without rows keep the ranks in step: all ranks run the same number."""
        raise NotImplementedError

    def apply_gradients(self, lr: float) -> float | None:
        """Sum gradients over ranks, clip, update, zero, and return their norm.

        If it is not finite, only zero the gradients and return None."""
        raise NotImplementedError

    def num_micro_batches(self, num_planned: int) -> int:
        """Return how many micro-batches to run; a backend whose ranks run in step returns the same on all of them."""
        return num_planned

    def forward(self, batch: Batch, *, temperature: float) -> TokenOutputs:
        """Return the outputs of all tokens under `loss_mask`, in batch order; zeros where `run` does not use them."""
        self.weight_update.check_complete()
        found = {name: torch.zeros(batch.num_tokens, device=self.device) for name in self.output_names}
        offsets, plan = batch.offsets(), self._plan(batch)

        def keep(i: int, out: TokenOutputs) -> Tensor:
            if plan[i]:
                where = torch.cat([torch.arange(int(offsets[row]), int(offsets[row + 1])) for row in plan[i]])
                for name, column in found.items():
                    column[where.to(self.device)] = getattr(out, name)
            return torch.zeros((), device=self.device)

        with torch.no_grad():
            self.run([batch.take(rows) for rows in plan], keep, temperature=temperature, backward=False)
        return TokenOutputs(**found)

    def forward_backward(self, batch: Batch, loss: LossFunction, *, temperature: float) -> Metrics:
        """Accumulate the gradients of every micro-batch."""
        assert self.context.trained, "forward_backward on a frozen model"
        self.weight_update.check_complete()
        plan, metrics = self._plan(batch), []
        micro_batches = [batch if len(rows) == len(batch) else batch.take(rows) for rows in plan]

        def apply(i: int, out: TokenOutputs) -> Tensor:
            if not plan[i]:
                return torch.zeros((), device=self.device)
            scalar, of_this = loss(out, micro_batches[i])
            metrics.append(of_this)
            return scalar

        self.run(micro_batches, apply, temperature=temperature, backward=True)
        return merge_metrics(metrics)

    def step(self) -> Metrics:
        """Run an optimizer step; a gradient that is not finite changes nothing."""
        assert self.context.trained, "step on a frozen model"
        lr = lr_at(self.optimizer_config, self.num_steps, self.context.total_steps)
        norm = self.apply_gradients(lr)
        if norm is None:
            return {"skipped": Mean(1.0), "lr": Mean(lr)}
        self.num_steps += 1
        return {"grad_norm": Mean(norm), "lr": Mean(lr), "skipped": Mean(0.0)}

    def _plan(self, batch: Batch) -> list[list[int]]:
        """Return the rows of each micro-batch, some of them empty."""
        plan = plan_micro_batches(batch, self.max_tokens)
        return plan + [[]] * (self.num_micro_batches(len(plan)) - len(plan))


@dataclass(frozen=True, slots=True)
class Targets:
    """Tokens of a micro-batch whose outputs the loss needs; each is computed from the hidden state before it."""

    where: Tensor
    """[n] positions in the micro-batch, in ascending order."""
    ids: Tensor
    """[n] tokens."""
    num_tokens: int
    """T."""

    @classmethod
    def of(cls, micro_batch: Batch) -> Targets:
        """Return the tokens under `loss_mask`, without the first of each sample, which no hidden state precedes."""
        ids = micro_batch["input_ids"]
        where = micro_batch["loss_mask"].nonzero().squeeze(1)
        starts = micro_batch.offsets()[:-1][micro_batch.lengths > 0].to(ids.device)
        where = where[~torch.isin(where, starts)]
        return cls(where, ids[where], len(ids))

    @property
    def before(self) -> Tensor:
        """[n] positions of the hidden states."""
        return self.where - 1

    def outputs(self, names: Sequence[str], found: Sequence[Tensor] | Tensor) -> TokenOutputs:
        """Return outputs [T], zero elsewhere, from rows [n]; without targets, `found` is not used."""
        zeros = self.ids.new_zeros(self.num_tokens, dtype=torch.float32)
        if not len(self.ids):
            return TokenOutputs(**dict.fromkeys(names, zeros))
        return TokenOutputs(**{name: zeros.index_put((self.where,), row) for name, row in zip(names, found)})


def most_over_ranks(number: int, device: torch.device) -> int:
    """Return the largest of the numbers of all ranks. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return number
    most = torch.tensor([number], device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)
