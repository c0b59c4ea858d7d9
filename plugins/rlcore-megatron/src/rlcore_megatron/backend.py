"""`megatron`: one model over tensor-, context-, pipeline- and data-parallel devices, with the same results as `local`.

Every method except `offload` and `reload` is collective. All ranks of a pipeline or context group get the same rows and
plan the same micro-batches; data-parallel ranks plan their own. All ranks run as many micro-batches as the longest plan
has, and fill up with micro-batches of a single token whose loss is zero. Shapes: T tokens, n tokens under the loss.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from rlcore.data.batch import Batch
from rlcore.kits.backend.base import PackedBackend, Targets, UseOutputs, most_over_ranks
from rlcore.kits.backend.update import WeightUpdate
from rlcore.protocols.backend import BackendContext, ModelConfig, OptimizerConfig
from rlcore.protocols.optional import Saving
from rlcore_megatron.config import MegatronConfig
from rlcore_megatron.families import FAMILIES, Family
from rlcore_megatron.fit import check_installed, data_parallel_size, no_cuda

if TYPE_CHECKING:
    from rlcore_megatron.engine import Engine


class MegatronBackend(PackedBackend):
    """One rank of one model."""

    Config = MegatronConfig
    families: ClassVar[Mapping[str, Family]] = FAMILIES
    """model_type -> mapping of its weights."""

    def __init__(
        self, config: MegatronConfig, *, model: ModelConfig, optimizer: OptimizerConfig, context: BackendContext
    ) -> None:
        check_installed(config, model.precision)
        _check_device()
        super().__init__(model=model, optimizer=optimizer, context=context)
        self._config = config
        self.max_tokens *= config.context_parallel
        self._engine = self._make_engine()
        self.mesh = self._engine.grid.here

    def run(self, micro_batches: Sequence[Batch], use: UseOutputs, *, temperature: float, backward: bool) -> None:
        """Run the micro-batches through the pipeline, the same number on all ranks; only the last stage has outputs."""

        def compute(i: int, hidden: Tensor) -> Tensor:
            targets = Targets.of(micro_batches[i])
            found = self._engine.head(hidden, targets.before, targets.ids, temperature) if len(targets.ids) else ()
            scalar = use(i, targets.outputs(self.output_names, found))
            return hidden[:1].float().sum() * 0.0 + scalar  # so that earlier stages always get a gradient

        self._engine.run([_tokens(part) for part in micro_batches], compute, backward=backward)

    def apply_gradients(self, lr: float) -> float | None:
        """Sum and clip gradients and run the optimizer; skip the step if a gradient is not finite."""
        return self._engine.step(lr)

    def num_micro_batches(self, num_planned: int) -> int:
        """Return the largest number of any rank; the interleaved schedule needs a multiple of pipeline_parallel."""
        most = most_over_ranks(max(1, num_planned), self.device)
        return most + (-most % self._config.pipeline_parallel if self._config.virtual_stages > 1 else 0)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Return an iterator over all parameters under their Hugging Face names.

        Tied parameters appear once, the value head is left out, and the experts of a layer are one tensor. Tensors have
        the precision of the model, and are on the device even while the model is offloaded.
        """
        self.weight_update.check_complete()
        return self._engine.weights()

    def load_weights(self, weights: Iterator[tuple[str, Tensor]], mix: float = 1.0) -> None:
        """Load or mix in the weights of another backend; each rank takes its slices.

        A frozen bfloat16 model then has a float32 copy of its parameters in host memory, because bfloat16 loses small
        changes.
        """
        self._engine.load_weights(self.weight_update.checked(weights, self._engine.shapes(), mix), mix)

    def save(self, directory: Path) -> None:
        """Write a checkpoint: each rank writes its slices of float32 parameters and moments."""
        self.save_async(directory).finish()

    def save_async(self, directory: Path) -> Saving:
        """Copy to host memory and write in a thread. Every rank must call `finish` on the result."""
        self.weight_update.check_complete()
        return self._engine.save(directory, self.num_steps)

    def load(self, directory: Path) -> None:
        """Load this rank's part of a checkpoint, which any grid may have written."""
        self.num_steps = self._engine.load(directory)
        self.weight_update = WeightUpdate()

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
        """Move parameters, gradients and optimizer state to host memory."""
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
                model=self.model_config,
                optimizer=self.optimizer_config,
                context=self.context,
            )


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
