"""Base classes of the workers with a model: they create, save and offload its backend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from rlcore.controller.dispatch import dispatch
from rlcore.data.batch import Batch
from rlcore.data.shares import UNIT
from rlcore.errors import ColumnError
from rlcore.models.load import copy_tokenizer, load_tokenizer
from rlcore.protocols.backend import Backend, BackendContext, ModelConfig, OptimizerConfig
from rlcore.protocols.optional import SavesInBackground, Saving, TrainsUnits
from rlcore.protocols.worker import WorkerContext
from rlcore.registry import PluginSpec, load
from rlcore.types import Counts, LossTerms, Mean, Metrics, TokenOutputs, merge_metrics
from rlcore.workers.averaging import reduce_metrics, reduce_terms
from rlcore.workers.base import Worker
from rlcore.workers.demonstrations import demonstrate


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Options of a worker's model; only plain data and plugin specs, as they are sent to the hosts."""

    backend: PluginSpec
    backend_config: Any
    model: ModelConfig
    optimizer: OptimizerConfig
    algorithm: PluginSpec
    algorithm_config: Any
    temperature: float
    """Sampling temperature, also used for log-probs."""
    total_steps: int
    """Optimizer steps of the run, for the schedule."""
    seed: int


class ModelWorker(Worker):
    """A worker with a backend. Subclasses define its head and whether it is trained."""

    head: Literal["token", "value"] = "token"
    trained = True

    def __init__(self, context: WorkerContext, *, options: ModelOptions) -> None:
        super().__init__(context)
        self.options = options
        backend_class: Any = load(options.backend, rank=context.rank, host=context.host)
        self.backend: Backend = backend_class(
            options.backend_config,
            model=options.model,
            optimizer=options.optimizer,
            context=BackendContext(
                rank=context.rank,
                world_size=context.world_size,
                device=context.device,
                head=self.head,
                trained=self.trained,
                total_steps=options.total_steps,
                seed=options.seed,
            ),
        )
        self.mesh = self.backend.mesh
        self._saving: Saving | None = None

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Stream the parameters; called by the host to send weights."""
        return self.backend.weights()

    def load_weights(self, weights: Iterator[tuple[str, Tensor]], version: int, mix: float = 1.0) -> None:
        """Set each parameter p to (1 - mix) · p + mix · new; called by the host when it receives the weights."""
        self.backend.load_weights(weights, mix)

    @dispatch("dp", on_device=False)
    def demonstrations(self, prompts: Batch, columns: Sequence[str], max_tokens: int) -> Batch:
        """Build samples from texts of the data, one for each of these columns."""
        return demonstrate(prompts, columns, load_tokenizer(self.options.model.path), max_tokens)

    @dispatch("all", on_device=False)
    def offload(self) -> None:
        """Move the model to host memory."""
        self.backend.offload()

    @dispatch("all", on_device=False)
    def reload(self) -> None:
        """Move the model back to the device."""
        self.backend.reload()

    def save_to(self, directory: Path, wait: bool) -> bool:
        if not self.trained:
            return False
        if self.context.rank == 0:
            copy_tokenizer(Path(self.options.model.path), directory)
        if wait or not isinstance(self.backend, SavesInBackground):
            self.backend.save(directory)
            return False
        self._saving = self.backend.save_async(directory)
        return True

    @dispatch("all", on_device=False)
    def finish_save(self) -> None:
        """Wait for a `save` that is still writing."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            saving.finish()

    def load_from(self, directory: Path) -> None:
        if self.trained:
            self.backend.load(directory)

    def forward(self, batch: Batch) -> TokenOutputs:
        """Run one forward pass of this rank's share, without gradient."""
        return self.backend.forward(batch.to(self.context.device), temperature=self.options.temperature)


class TrainedWorker(ModelWorker):
    """A worker whose model is trained with its algorithm's loss."""

    def __init__(self, context: WorkerContext, *, options: ModelOptions) -> None:
        super().__init__(context, options=options)
        algorithm_class: Any = load(options.algorithm, rank=context.rank, host=context.host)
        self.algorithm = algorithm_class(options.algorithm_config)
        self.has_stepped = False
        """True if the model was updated since its weights were last sent, so that they differ from the engine's."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        self.has_stepped = False
        return super().weights()

    @dispatch("dp_metrics")
    def update(self, batch: Batch, counts: Counts) -> Metrics:
        """Run one optimizer step on a mini-batch; `counts` are those of the whole mini-batch over all ranks.

        Raises:
            ColumnError: the algorithm has units, but the batch has no column `unit_id`.
        """
        if isinstance(self.algorithm, TrainsUnits) and UNIT not in batch:
            raise ColumnError(
                f"the loss compares the rows with one '{self.algorithm.unit.column}', but the batch has no '{UNIT}'\n"
                "Inherit `update` from Epochs, or begin it with  experience, _ = whole_units(experience, self.unit)"
            )

        def loss(out: TokenOutputs, micro_batch: Batch) -> tuple[Tensor, Metrics]:
            terms = self.terms(out, micro_batch)
            scalar = reduce_terms(terms, micro_batch, counts)
            metrics = reduce_metrics(terms.metrics, micro_batch) | self.observe(out, micro_batch)
            return scalar, metrics | {"loss": Mean(float(scalar.detach()), 0.0)}

        metrics = self.backend.forward_backward(
            batch.to(self.context.device), loss, temperature=self.options.temperature
        )
        # micro-batches and ranks each have a part of one sum, so their total weight is 1
        metrics["loss"] = Mean(metrics["loss"].total if "loss" in metrics else 0.0, 1.0 / self.mesh.dp_size)
        self.has_stepped = True
        return merge_metrics([metrics, self.backend.step()])

    def terms(self, out: TokenOutputs, batch: Batch) -> LossTerms:
        """Return the loss terms of this role."""
        raise NotImplementedError

    def observe(self, out: TokenOutputs, batch: Batch) -> Metrics:
        """Return more metrics of a micro-batch."""
        return {}
