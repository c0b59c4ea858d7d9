"""`fsdp`: one model sharded over all devices of its pool, with the same results as `local` on every grid.

Every method except `offload` and `reload` is collective. Each rank plans its own micro-batches; all ranks run as many as
the longest plan has, and fill up with micro-batches of a single token whose loss is zero. Shapes: T tokens, n tokens
under the loss.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlcore.data.batch import Batch
from rlcore.errors import ConfigError
from rlcore.kits.backend.base import PackedBackend, Targets, UseOutputs, most_over_ranks
from rlcore.kits.backend.checkpoint import ShardSaving
from rlcore.kits.backend.update import WeightUpdate, blend
from rlcore.kits.backend.value_head import VALUE_HEAD
from rlcore.models.activations import checkpoint_activations
from rlcore.models.load import check_directory, read_config
from rlcore.models.size import ModelSize
from rlcore.protocols.backend import BackendContext, ModelConfig, OptimizerConfig
from rlcore.registry.versions import check_versions
from rlcore.types import TokenOutputs
from rlcore_fsdp import checkpoint, eight_bit, lora, memory
from rlcore_fsdp.attention import Layout
from rlcore_fsdp.checkpoint import MODEL, FSDPState
from rlcore_fsdp.config import FSDPConfig
from rlcore_fsdp.load import laid_as, local_part, own_part
from rlcore_fsdp.mesh import data_parallel_size, make_grid
from rlcore_fsdp.model import PackedModel, build, check_fits, check_parts
from rlcore_fsdp.optimizer import Optimizers, clip, gradient_norm, sum_over_tensor_axis

_with_adapters: weakref.WeakValueDictionary[object, PackedModel] = weakref.WeakValueDictionary()
"""Models with adapters in this process: a reference model is the policy's own model with its adapters off."""


class FSDPBackend(PackedBackend):
    """One rank of one model."""

    Config = FSDPConfig

    def __init__(
        self, config: FSDPConfig, *, model: ModelConfig, optimizer: OptimizerConfig, context: BackendContext
    ) -> None:
        check_versions("rlcore-fsdp", "backend=fsdp")
        super().__init__(model=model, optimizer=optimizer, context=context)
        self._config = config
        self.max_tokens *= config.context_parallel
        self._grid = make_grid(config, context)
        self.mesh = self._grid.here
        self._packed = self._share_or_build()
        self._base = checkpoint.fingerprint_of(model.path) if config.lora_rank and context.trained else 0
        """Fingerprint of the weights that the adapters belong to, taken when they are read."""
        names: dict[nn.Parameter, str] = {}
        if context.trained:
            self._packed.is_trained = True
            if model.gradient_checkpointing:
                checkpoint_activations(self._packed.model)
            names = self._packed.trained_parameters(adapters=config.lora_rank > 0)
        elif not config.lora_rank:
            self._packed.requires_grad_(False)
        self._names = names
        for parameter in self._packed.parameters() if context.trained else ():
            parameter.requires_grad_(parameter in names)
        self._partial = [parameter for parameter, name in names.items() if name in self._packed.partial]
        if optimizer.name != "adamw" and config.optimizer != "adamw":
            raise ConfigError(
                f"optimizer.name={optimizer.name} and backend.optimizer={config.optimizer} exclude each other\n"
                "Type  backend.optimizer=adamw  or  optimizer.name=adamw"
            )
        matrices = self._matrices() if config.optimizer == "muon" else set()
        in_8_bits = config.optimizer == "adamw_8bit"
        self._optimizer = Optimizers(names, optimizer, matrices, in_8_bits=in_8_bits) if context.trained else None
        self._save_group = dist.new_group(backend="gloo")

    def run(self, micro_batches: Sequence[Batch], use: UseOutputs, *, temperature: float, backward: bool) -> None:
        """Run the micro-batches one after the other, the same number on all ranks."""
        phase = "forward and backward" if backward else "forward"
        share_gradients: Any = self._packed.set_requires_gradient_sync
        with self._without_adapters_if_frozen():
            for i, micro_batch in enumerate(micro_batches):
                if backward:
                    share_gradients(i == len(micro_batches) - 1 or self._config.reduce_gradients == "every")
                with self._explained(phase, micro_batch.num_tokens):
                    out, zero = self._outputs(micro_batch, temperature)
                    scalar = use(i, out)
                    if backward:  # FSDP averages gradients over ranks, but losses are summed
                        (zero + scalar * self._grid.averaged_over).backward()  # type: ignore[no-untyped-call]
            if not backward:
                self._packed.settle()  # the parameters must be sharded again before the adapters are turned on

    def apply_gradients(self, lr: float) -> float | None:
        """Clip gradients and run the optimizer; skip the step if a gradient is not finite."""
        assert self._optimizer is not None, "step on a frozen model"
        sum_over_tensor_axis(self._partial, self._grid)
        norm = gradient_norm(self._names, self._grid)
        if not bool(torch.isfinite(norm)):
            self._optimizer.zero()
            return None
        if self.optimizer_config.clip_grad_norm:
            clip(self._names, norm, self.optimizer_config.clip_grad_norm)
        with self._explained("optimizer step"):
            self._optimizer.step(lr)
        return float(norm)

    def num_micro_batches(self, num_planned: int) -> int:
        """Return the largest number of micro-batches that any rank has planned."""
        return most_over_ranks(num_planned, self.device)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters under their Hugging Face names, gathered one at a time, with adapters merged.

        The value head is left out. With precision=bfloat16 the tensors are bfloat16, which the model computes with.
        With lora_sync=adapters, only the adapters are sent; see `lora.sent_alone`.
        """
        self.weight_update.check_complete()
        parameters = dict(self._packed.model.named_parameters())
        if self._config.lora_sync == "adapters":
            factors = ((name, self._whole(value)) for name, value in parameters.items() if lora.is_adapter(name))
            yield from ((name, self._cast(value)) for name, value in lora.sent_alone(factors, self._config))
            return
        scaling = lora.scaling_of(self._config) if self._config.lora_rank else 1.0
        for name, parameter in parameters.items():
            if lora.is_adapter(name):
                continue
            layer, _, part = name.partition(".base_layer.")
            factor = f"{layer}.lora_A.{lora.ADAPTER}.weight"
            if part != "weight" or factor not in parameters:
                yield lora.plain_name(name), self._whole(parameter, cast=True)
                continue
            a, b = (self._whole(parameters[key]) for key in (factor, factor.replace("lora_A", "lora_B")))
            yield lora.plain_name(name), self._cast(lora.merged(self._whole(parameter), a, b, scaling))

    @torch.no_grad()
    def load_weights(self, weights: Iterator[tuple[str, Tensor]], mix: float = 1.0) -> None:
        """Load or mix in the weights of another backend; each rank takes its part of each tensor.

        Raises:
            ConfigError: this model has adapters, and may share its weights with another role.
        """
        if self._config.lora_rank:
            raise ConfigError(
                f"lora_rank={self._config.lora_rank}: a model with adapters cannot receive the weights of another model\n"
                "Type  backend.lora_rank=0"
            )
        own = dict(self._packed.model.named_parameters())
        shapes = {name: tuple(parameter.shape) for name, parameter in own.items()}
        for name, new in self.weight_update.checked(weights, shapes, mix):
            blend(local_part(own[name]), new[own_part(own[name])], mix)

    def save(self, directory: Path) -> None:
        """Write a checkpoint, one file per rank; with adapters, the adapters only."""
        self._begin_save(directory, wait=True).finish()

    def save_async(self, directory: Path) -> ShardSaving:
        """Copy to host memory and write in the background. Every rank must call `finish` on the result."""
        return self._begin_save(directory, wait=False)

    def load(self, directory: Path) -> None:
        """Load a checkpoint written by any number of ranks; change the model only after everything has been read."""
        state = checkpoint.read(directory)
        fresh = {name: torch.empty_like(tensor) for name, tensor in self._kept().items()}
        checkpoint.check_same_adapters(directory, state, self._adapter(), self.model_config.path)
        checkpoint.check_same_model(directory, state, self._class_name(), fresh)
        moments = self._optimizer.empty_tensors(state.tensors) if self._optimizer is not None else {}
        checkpoint.read_tensors(directory, {**fresh, **moments}, self._save_group)
        with torch.no_grad():
            for name, tensor in self._kept().items():
                tensor.copy_(fresh[name])
        if self._optimizer is not None:
            self._optimizer.restore(moments, state.counters)
        self.num_steps = state.num_steps
        self.weight_update = WeightUpdate()

    @staticmethod
    def export(source: Path, target: Path) -> None:
        """Write a Hugging Face model (merged), with the head of a critic, and adapters for peft in `adapter/`."""
        checkpoint.export(source, target)

    @staticmethod
    def frees_device(config: FSDPConfig) -> bool:
        """Return whether the model can be offloaded; with `cpu_offload` it is in host memory already."""
        return not config.cpu_offload

    @staticmethod
    def model_bytes(config: FSDPConfig, num_parameters: int, *, world_size: int, trained: bool) -> int:
        """Return the bytes of a shard: float32 parameters, and gradients and moments if trained; without adapters."""
        whole = trained and not config.lora_rank
        each = (10 if config.optimizer == "adamw_8bit" else 16) if whole else 4
        return 0 if config.cpu_offload else num_parameters * config.replicate // world_size * each

    @staticmethod
    def working_bytes(config: FSDPConfig, size: ModelSize, *, precision: str, world_size: int, trained: bool) -> int:
        """Return the bytes of gathered parameters and of gradients that are not sharded yet."""
        return memory.working_bytes(config, size, precision=precision, world_size=world_size, trained=trained)

    @staticmethod
    def data_parallel(config: FSDPConfig, *, model: ModelConfig, world_size: int, device: str) -> int:
        """Return the number of data-parallel ranks; ranks of one tensor or context group get the same rows.

        Raises:
            UserError: the pool, the model or an installed package does not fit the settings.
        """
        check_versions("rlcore-fsdp", "backend=fsdp", "lora" if config.lora_rank else "")
        if config.optimizer == "adamw_8bit":
            eight_bit.check_installed()
        path = check_directory(model.path)
        hf_config = read_config(path)
        check_fits(hf_config, config, model.path)
        check_parts(path, config)
        return data_parallel_size(config, world_size)

    def offload(self) -> None:
        self._move("cpu")

    def reload(self) -> None:
        self._move(str(self.device))

    def _share_or_build(self) -> PackedModel:
        config, model, context = self._config, self.model_config, self.context
        if not config.lora_rank:
            return build(model, config, self._grid, context)
        key = (model.path, model.precision, context.head, context.device, context.seed, config)
        found = _with_adapters.get(key)
        if found is None or (context.trained and found.is_trained):
            found = _with_adapters[key] = build(model, config, self._grid, context)
        return found

    def _without_adapters_if_frozen(self) -> AbstractContextManager[None]:
        if self._config.lora_rank and not self.context.trained:
            return lora.adapters_off(self._packed.model)
        return nullcontext()

    def _outputs(self, batch: Batch, temperature: float) -> tuple[TokenOutputs, Tensor]:
        """Return outputs [T], zero outside the loss mask, and a zero with a gradient."""
        ids, targets = batch["input_ids"], Targets.of(batch)
        layout = Layout(batch.lengths.tolist() if len(ids) else [1], self.device, self._grid.context)
        padded = torch.nn.functional.pad(ids, (0, layout.padding if len(ids) else 1 + layout.padding))
        found, zero = self._packed(self._packed.outputs, padded, layout, targets.before, targets.ids, temperature)
        return targets.outputs(self.output_names, found), zero

    def _explained(self, phase: str, num_tokens: int | None = None) -> AbstractContextManager[None]:
        holds_whole_gradient = self._config.reduce_gradients == "last" and "backward" in phase
        return memory.explained(
            phase,
            num_tokens,
            self.model_config.max_tokens_per_device,
            self.device,
            holds_whole_gradient=holds_whole_gradient,
        )

    def _whole(self, parameter: Tensor, *, cast: bool = False) -> Tensor:
        """Gather a parameter on the device."""
        tensor = parameter.detach()
        tensor = self._cast(tensor) if cast else tensor
        if not isinstance(tensor, DTensor):
            return tensor
        whole: Any = laid_as(tensor, tensor.to_local().to(self.device))
        return whole.full_tensor()  # type: ignore[no-any-return]

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(torch.bfloat16) if self.model_config.precision == "bfloat16" else tensor

    def _kept(self) -> dict[str, Tensor]:
        """Return model.NAME -> parameter or buffer, for everything that a checkpoint stores."""
        if self._config.lora_rank:
            return {MODEL + name: parameter.detach() for parameter, name in self._names.items()}
        named = {MODEL + name: tensor.detach() for name, tensor in self._packed.stored().items()}
        head = self._packed.value_head
        return named | ({MODEL + VALUE_HEAD: head.weight.detach()} if head is not None else {})

    def _begin_save(self, directory: Path, *, wait: bool) -> ShardSaving:
        self.weight_update.check_complete()
        tensors = self._kept() | (self._optimizer.tensors() if self._optimizer is not None else {})
        state = FSDPState(
            num_steps=self.num_steps,
            model_class=self._class_name(),
            model_path=str(Path(self.model_config.path).absolute()),
            adapter=self._adapter(),
            base=self._base,
            counters=self._optimizer.counters() if self._optimizer is not None else {},
            tensors={name: list(tensor.shape) for name, tensor in tensors.items()},
        )
        if self.context.rank == 0:
            self._packed.model.config.save_pretrained(directory)
            self._packed.model.generation_config.save_pretrained(directory)
        return checkpoint.save(directory, tensors, state, self._save_group, wait=wait)

    def _adapter(self) -> dict[str, Any] | None:
        """Return the LoRA settings that a checkpoint stores."""
        config = self._config
        if not config.lora_rank:
            return None
        alpha, targets = config.lora_alpha or float(config.lora_rank), list(config.lora_targets)
        rank, rslora = config.lora_rank, config.lora_rslora
        return {"lora_rank": rank, "lora_alpha": alpha, "lora_rslora": rslora, "lora_targets": targets}

    def _class_name(self) -> str:
        return type(self._packed.model).__name__

    def _matrices(self) -> set[str]:
        """Return the parameters for Muon: the matrices of the layers, without embeddings and output."""
        ends = (self._packed.model.get_input_embeddings(), self._packed.model.get_output_embeddings())
        others = {id(parameter) for module in ends for parameter in module.parameters()}
        return {
            name
            for parameter, name in self._names.items()
            if parameter.dim() == 2 and id(parameter) not in others and name != VALUE_HEAD
        }

    def _move(self, device: str) -> None:
        if self.device.type == "cpu" or self._config.cpu_offload:
            return
        self._packed.to(device)
        if self._optimizer is not None:
            self._optimizer.to(device)
        if device == "cpu":
            torch.cuda.empty_cache()
