"""Base classes of the workers with a model: they create, save and offload its backend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from rlcore.controller.dispatch import dispatch
from rlcore.data.batch import Batch
from rlcore.data.shares import UNIT
from rlcore.errors import ColumnError
from rlcore.models.load import check_directory, copy_tokenizer, load_tokenizer
from rlcore.models.size import ModelSize, activation_bytes, frozen_bytes, trained_bytes
from rlcore.protocols.algorithm import RoleSpec
from rlcore.protocols.backend import Backend, BackendContext, ModelConfig, OptimizerConfig
from rlcore.protocols.optional import (
    EstimatesModel,
    EstimatesStep,
    SavesInBackground,
    Saving,
    SplitsRows,
    TrainsUnits,
)
from rlcore.protocols.worker import WorkerContext
from rlcore.registry import PluginSpec, Resolved, load
from rlcore.types import Counts, LossTerms, Mean, Metrics, TokenOutputs, merge_metrics
from rlcore.workers.averaging import reduce_metrics, reduce_terms
from rlcore.workers.base import Worker
from rlcore.workers.demonstrations import demonstrate
from rlcore.workers.plan import PoolFacts, RoleMemory, RunPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Options of a worker's model; only plain data and plugin specs, as they are sent to the hosts."""

    backend: PluginSpec
    backend_config: Any
    model: ModelConfig
    optimizer: OptimizerConfig
    algorithm: PluginSpec
    algorithm_config: Any
    loss: str
    """Method of the algorithm that computes the loss; empty: the model is not trained."""
    temperature: float
    """Sampling temperature, also used for log-probs."""
    total_steps: int
    """Optimizer steps of the run, for the schedule."""
    seed: int


def updates_per_step(config: Any) -> int:
    """Return the number of optimizer steps in a training step, from the settings of an algorithm."""
    return int(getattr(config, "epochs", 1)) * int(getattr(config, "minibatches", 1))


class ModelWorker(Worker):
    """A worker with a backend. Subclasses define its head."""

    head: Literal["token", "value"] = "token"

    @classmethod
    def backend_of(cls, plan: RunPlan) -> tuple[Resolved, Any]:
        """Return the backend and its settings."""
        return plan.backend.resolved, plan.backend.config

    @classmethod
    def options_of(cls, plan: RunPlan, role: str) -> dict[str, Any]:
        config, spec = plan.config, plan.roles[role]
        (backend, backend_config), algorithm = cls.backend_of(plan), plan.algorithm
        options = ModelOptions(
            backend=backend.spec,
            backend_config=backend_config,
            model=replace(config.model, path=plan.models[role]),
            optimizer=attrgetter(spec.optimizer)(config),
            algorithm=algorithm.resolved.spec,
            algorithm_config=algorithm.config,
            loss=spec.loss or "",
            temperature=config.sampling.temperature or 1.0,
            total_steps=config.trainer.steps * updates_per_step(algorithm.config),
            seed=config.run.seed,
        )
        return {"options": options}

    @classmethod
    def data_parallel(cls, plan: RunPlan, role: str, pool: PoolFacts) -> int:
        """Return the data-parallel size. A backend that runs in another Python counts every device.

        Raises:
            UserError: the model cannot run on this pool.
        """
        backend, config = cls.backend_of(plan)
        if pool.own_python or not isinstance(backend.object, SplitsRows):
            return pool.num_devices
        model = replace(plan.config.model, path=plan.models[role])
        return backend.object.data_parallel(config, model=model, world_size=pool.num_devices, device=pool.device)

    @classmethod
    def memory(cls, plan: RunPlan, role: str, pool: PoolFacts) -> RoleMemory:
        cls.data_parallel(plan, role, pool)  # raises if the model cannot run there
        model, size = plan.config.model, ModelSize.read(check_directory(plan.models[role]))
        (backend, config), trained = cls.backend_of(plan), bool(plan.roles[role].loss)
        held = trained_bytes(size) if trained else frozen_bytes(size)
        if isinstance(backend.object, EstimatesModel):
            held = backend.object.model_bytes(config, size.num_parameters, world_size=pool.num_devices, trained=trained)
        working = 0
        if isinstance(backend.object, EstimatesStep):
            working = backend.object.working_bytes(
                config, size, precision=model.precision, world_size=pool.num_devices, trained=trained
            )
        if trained:
            working += activation_bytes(
                size,
                max_tokens=model.max_tokens_per_device,
                half=model.precision == "bfloat16",
                checkpointing=model.gradient_checkpointing,
            )
        return RoleMemory(device=held + working, offloaded=held * 3 // 4 if trained else held)  # without gradients

    @classmethod
    def has_state(cls, spec: RoleSpec) -> bool:
        return bool(spec.loss or spec.weights_from) or cls.save_to is not ModelWorker.save_to

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
                trained=bool(options.loss),
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
        self.backend.load(directory)

    def forward(self, batch: Batch, temperature_factor: float = 1.0) -> TokenOutputs:
        """Run one forward pass of this rank's share, without gradient, at this multiple of the sampling temperature."""
        temperature = self.options.temperature * temperature_factor
        return self.backend.forward(batch.to(self.context.device), temperature=temperature)


class TrainedWorker(ModelWorker):
    """A worker whose model is trained with a loss of its algorithm."""

    default_loss = "loss"

    def __init__(self, context: WorkerContext, *, options: ModelOptions) -> None:
        super().__init__(context, options=options)
        algorithm_class: Any = load(options.algorithm, rank=context.rank, host=context.host)
        self.algorithm = algorithm_class(options.algorithm_config)
        self.version = 0
        """Newest version of the weights that an engine received."""
        self.has_stepped = False
        """True if the model was updated since then, so that it differs from the engine."""

    @dispatch("all", on_device=False)
    def sampled_by_engine(self, version: int) -> None:
        self.version, self.has_stepped = version, False

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
        return getattr(self.algorithm, self.options.loss)(out, batch)  # type: ignore[no-any-return]

    def observe(self, out: TokenOutputs, batch: Batch) -> Metrics:
        """Return more metrics of a micro-batch."""
        return {}
