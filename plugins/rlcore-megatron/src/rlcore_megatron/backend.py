"""`megatron`: one model over tensor-, context-, pipeline- and data-parallel devices, with the same results as `local`.

Every method except `offload` and `reload` is collective. All ranks of a pipeline or context group get the same rows and
plan the same micro-batches; data-parallel ranks plan their own. All ranks run as many micro-batches as the longest plan
has, and fill up with micro-batches of a single token whose loss is zero. Shapes: T tokens, n tokens under the loss.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from rlcore.backends.optimizer import lr_at
from rlcore.data.batch import Batch
from rlcore.data.packing import plan_micro_batches
from rlcore.protocols.backend import BackendContext, ModelConfig, OptimizerConfig
from rlcore.protocols.optional import Saving
from rlcore.types import LossFunction, Mean, Metrics, TokenOutputs, merge_metrics
from rlcore_megatron.config import MegatronConfig
from rlcore_megatron.families import FAMILIES, Family
from rlcore_megatron.fit import check_installed, data_parallel_size, no_cuda

if TYPE_CHECKING:
    from rlcore_megatron.engine import Engine


class MegatronBackend:
    """One rank of one model."""

    Config = MegatronConfig
    families: ClassVar[Mapping[str, Family]] = FAMILIES
    """model_type -> mapping of its weights."""

    def __init__(
        self, config: MegatronConfig, *, model: ModelConfig, optimizer: OptimizerConfig, context: BackendContext
    ) -> None:
        check_installed(config, model.precision)
        _check_device()
        self._config, self._model_config, self._optimizer_config = config, model, optimizer
        self._context, self._device = context, torch.device(context.device)
        self._engine = self._make_engine()
        self.mesh = self._engine.grid.here
        self._num_steps = 0

    @torch.no_grad()
    def forward(self, batch: Batch, *, temperature: float) -> TokenOutputs:
        """Compute the outputs of all tokens under `loss_mask`, in batch order; zeros on ranks that do not return."""
        found = {name: torch.zeros(batch.num_tokens, device=self._device) for name in self._output_names()}
        offsets, plan = batch.offsets(), self._plan(batch)
        parts = [batch.take(rows) for rows in plan]

        def compute(i: int, hidden: Tensor) -> Tensor:
            if plan[i]:
                out = self._outputs(parts[i], hidden, temperature)
                where = torch.cat([torch.arange(int(offsets[row]), int(offsets[row + 1])) for row in plan[i]])
                for name, column in found.items():
                    column[where.to(self._device)] = getattr(out, name)
            return hidden.new_zeros((), dtype=torch.float32)

        self._engine.run([_tokens(part) for part in parts], compute, backward=False)
        return TokenOutputs(**found)

    def forward_backward(self, batch: Batch, loss: LossFunction, *, temperature: float) -> Metrics:
        """Accumulate the gradients of every micro-batch; only the last stage has metrics."""
        assert self._context.trained, "forward_backward on a frozen model"
        plan, metrics = self._plan(batch), []
        parts = [batch if len(rows) == len(batch) else batch.take(rows) for rows in plan]

        def compute(i: int, hidden: Tensor) -> Tensor:
            total = hidden[:1].float().sum() * 0.0  # so that earlier stages always get a gradient
            if plan[i]:
                scalar, of_this = loss(self._outputs(parts[i], hidden, temperature), parts[i])
                metrics.append(of_this)
                total = total + scalar
            return total

        self._engine.run([_tokens(part) for part in parts], compute, backward=True)
        return merge_metrics(metrics)

    def step(self) -> Metrics:
        """Sum and clip gradients and run the optimiser; skip the step if a gradient is not finite."""
        assert self._context.trained, "step on a frozen model"
        lr = lr_at(self._optimizer_config, self._num_steps, self._context.total_steps)
        norm = self._engine.step(lr)
        if norm is None:
            return {"skipped": Mean(1.0), "lr": Mean(lr)}
        self._num_steps += 1
        return {"grad_norm": Mean(norm), "lr": Mean(lr), "skipped": Mean(0.0)}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Return an iterator over all parameters under their Hugging Face names.

        Tied parameters appear once, the value head is left out, and the experts of a layer are one tensor. Tensors have
        the precision of the model, and are on the device even while the model is offloaded.
        """
        return self._engine.weights()

    def load_weights(self, weights: Iterator[tuple[str, Tensor]], mix: float = 1.0) -> None:
        """Load or mix in the weights of another backend; each rank takes its slices.

        A frozen bfloat16 model that weights are mixed into has a float32 copy of its parameters in host memory, because
        bfloat16 loses small changes.
        """
        self._engine.load_weights(weights, mix)

    def save(self, directory: Path) -> None:
        """Write a checkpoint: each rank writes its slices of float32 parameters and moments."""
        self._engine.save(directory, self._num_steps).finish()

    def save_async(self, directory: Path) -> Saving:
        """Copy to host memory and write in a thread. Every rank must call `finish` on the result."""
        return self._engine.save(directory, self._num_steps)

    def load(self, directory: Path) -> None:
        """Load this rank's part of a checkpoint, which any grid may have written."""
        self._num_steps = self._engine.load(directory)

    @staticmethod
    def export(source: Path, target: Path) -> None:
        """Write a Hugging Face model in float32, with the head of a critic."""
        from rlcore_megatron import checkpoint

        checkpoint.export(source, target)

    @staticmethod
    def frees_device(config: MegatronConfig) -> bool:
        """Return True: the model can be offloaded."""
        return True

    @staticmethod
    def model_bytes(config: MegatronConfig, num_parameters: int, *, world_size: int, trained: bool) -> int:
        """Return the bytes of this device's parameters, with float32 gradients, main parameters and moments if trained.

        An upper bound for float32 and bfloat16; experts are counted as if they were not distributed.
        """
        devices = config.tensor_parallel * config.pipeline_parallel
        sharers = max(1, world_size // devices) if config.distributed_optimizer else 1
        each = max(4 + 4 + 8 / sharers, 2 + 4 + 12 / sharers) if trained else 4
        return int(num_parameters // devices * each)

    @classmethod
    def data_parallel(cls, config: MegatronConfig, *, model: ModelConfig, world_size: int, device: str) -> int:
        """Return the number of data-parallel ranks; ranks of one tensor, context or pipeline group get the same rows.

        Raises:
            UserError: the pool, the model or an installed package does not fit the settings.
        """
        return data_parallel_size(config, cls.families, model, world_size=world_size, device=device)

    def offload(self) -> None:
        """Move parameters, gradients and optimiser state to host memory."""
        self._engine.offload()

    def reload(self) -> None:
        self._engine.reload()

    def _make_engine(self) -> Engine:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # megatron-core warns about every missing optional package
            from rlcore_megatron.engine import Engine

            return Engine(
                self._config,
                self.families,
                model=self._model_config,
                optimizer=self._optimizer_config,
                context=self._context,
            )

    def _output_names(self) -> tuple[str, ...]:
        return ("log_probs", "entropy") if self._context.head == "token" else ("values",)

    def _plan(self, batch: Batch) -> list[list[int]]:
        """Return the rows of each micro-batch; all ranks get the same number of micro-batches, some of them empty."""
        max_tokens = self._model_config.max_tokens_per_device * self._config.context_parallel
        plan = plan_micro_batches(batch, max_tokens)
        longest = torch.tensor([max(1, len(plan))], device=self._device)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        wanted = int(longest)
        if self._config.virtual_stages > 1:  # the interleaved schedule needs a multiple of pipeline_parallel
            wanted += -wanted % self._config.pipeline_parallel
        return plan + [[]] * (wanted - len(plan))

    def _outputs(self, batch: Batch, hidden: Tensor, temperature: float) -> TokenOutputs:
        """Return outputs [T], zero outside the loss mask; token i is computed from the hidden state before it."""
        ids = batch["input_ids"]
        where = batch["loss_mask"].nonzero().squeeze(1)
        starts = batch.offsets()[:-1][batch.lengths > 0].to(self._device)
        where = where[~torch.isin(where, starts)]  # no hidden state precedes the first token of a sample
        if not len(where):
            zeros = torch.zeros(len(ids), device=self._device)
            return TokenOutputs(**dict.fromkeys(self._output_names(), zeros))
        found = self._engine.head(hidden, where - 1, ids[where], temperature)
        spread = [torch.zeros(len(ids), device=self._device).index_put((where,), row) for row in found]
        return TokenOutputs(**dict(zip(self._output_names(), spread)))


def _tokens(batch: Batch) -> tuple[Tensor, list[int]]:
    """Return tokens and lengths of a micro-batch; one token if it is empty."""
    ids = batch["input_ids"]
    if not len(ids):
        return ids.new_zeros(1), [1]
    return ids, [length for length in batch.lengths.tolist() if length]


def _check_device() -> None:
    """Check that there is a CUDA device.

    Raises:
        ConfigError: there is none.
    """
    try:
        torch.empty(0, device="cuda")
    except (AssertionError, RuntimeError) as error:
        raise no_cuda(f"this machine has none: {str(error).splitlines()[0]}") from error
