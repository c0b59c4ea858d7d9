"""`local`: one full model per rank in plain PyTorch with summed gradients; the reference for other backends.

Samples are packed without padding; log-probs exist only for the tokens in the loss. Models run in evaluation mode,
without dropout, so that a forward pass gives the same result in training and scoring.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rlcore.data.batch import Batch
from rlcore.errors import ModelError
from rlcore.kits.backend.base import PackedBackend, Targets, UseOutputs
from rlcore.kits.backend.optimizer import check_optimizer, make_optimizer, optimizer_tensors, restore_optimizer
from rlcore.kits.backend.update import WeightUpdate, blend
from rlcore.kits.backend.value_head import HEAD_FILE, VALUE_HEAD, initial_value_head
from rlcore.models import attention
from rlcore.models.activations import checkpoint_activations
from rlcore.models.attention import Packing
from rlcore.models.head import TokenHead, hidden_states, use_packed_attention
from rlcore.models.load import check_directory, check_positions, check_same_files, load_model, read_config
from rlcore.protocols.backend import BackendContext, ModelConfig, OptimizerConfig
from rlcore.types import Mesh, TokenOutputs

_MOMENTS = "optimizer.moments"
"""Safetensors with another suffix, because engines load every *.safetensors of a directory as weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalConfig:
    """No settings: model and optimizer have their own sections."""


class LocalBackend(PackedBackend):
    """One rank of one model."""

    Config = LocalConfig

    def __init__(
        self, config: LocalConfig, *, model: ModelConfig, optimizer: OptimizerConfig, context: BackendContext
    ) -> None:
        super().__init__(model=model, optimizer=optimizer, context=context)
        attention.register()
        self.mesh = Mesh(
            rank=context.rank, world_size=context.world_size, dp_rank=context.rank, dp_size=context.world_size
        )
        self._model = load_model(model.path, device=context.device)
        self._token_head = TokenHead(self._model)
        use_packed_attention(self._model, self._token_head)
        self._value_head = self._make_value_head() if context.head == "value" else None
        if context.trained and model.gradient_checkpointing:
            checkpoint_activations(self._model)
        self._names = self._trained_parameters() if context.trained else {}
        self._optimizer = make_optimizer(list(self._names), optimizer) if context.trained else None
        if not context.trained:
            self._model.requires_grad_(False)
        if self.mesh.world_size > 1:
            check_same_files(check_directory(model.path), self.device)

    def run(self, micro_batches: Sequence[Batch], use: UseOutputs, *, temperature: float, backward: bool) -> None:
        """Run the micro-batches one after the other; ranks need not run the same number."""
        for i, micro_batch in enumerate(micro_batches):
            scalar = use(i, self._outputs(micro_batch, temperature))
            if backward and scalar.requires_grad:
                scalar.backward()  # type: ignore[no-untyped-call]

    def apply_gradients(self, lr: float) -> float | None:
        """Sum over ranks, clip, update; a gradient that is not finite changes nothing."""
        assert self._optimizer is not None, "step on a frozen model"
        self._sum_gradients()
        gradients = [parameter.grad for parameter in self._names if parameter.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
        if math.isfinite(norm):
            if self.optimizer_config.clip_grad_norm:
                limit = self.optimizer_config.clip_grad_norm
                torch.nn.utils.clip_grads_with_norm_(list(self._names), limit, torch.tensor(norm))
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm if math.isfinite(norm) else None

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters by Hugging Face name: tied ones once, without the value head."""
        self.weight_update.check_complete()
        for name, parameter in self._model.named_parameters():
            yield name, parameter.detach()

    @torch.no_grad()
    def load_weights(self, weights: Iterator[tuple[str, Tensor]], mix: float = 1.0) -> None:
        """Load or mix in the weights of another backend; see `Backend`."""
        own = dict(self._model.named_parameters())
        shapes = {name: tuple(parameter.shape) for name, parameter in own.items()}
        for name, new in self.weight_update.checked(weights, shapes, mix):
            blend(own[name], new, mix)

    def save(self, directory: Path) -> None:
        """Write a Hugging Face model, the value head and the optimizer's state, on rank 0."""
        self.weight_update.check_complete()
        if self.context.rank == 0:
            self._model.save_pretrained(directory)
            if self._value_head is not None:
                save_file({VALUE_HEAD: self._value_head.weight.detach()}, directory / HEAD_FILE)
            if self._optimizer is not None:
                save_file(optimizer_tensors(self._optimizer, self._names), directory / _MOMENTS)
            (directory / "backend.json").write_text(json.dumps({"num_steps": self.num_steps}))

    def load(self, directory: Path) -> None:
        """Read and check everything before changing anything."""
        state = json.loads(_need(directory / "backend.json").read_text())
        fresh = dict(load_model(str(directory)).named_parameters())
        own = dict(self._model.named_parameters())
        different = sorted(
            name
            for name in {*fresh, *own}
            if name not in fresh or name not in own or fresh[name].shape != own[name].shape
        )
        if different:
            raise ModelError(
                f"{directory} is a checkpoint of another model: {len(different)} parameters differ, the first is"
                f" {different[0]}\nType the model.path that the run started with."
            )
        head = load_file(_need(directory / HEAD_FILE)) if self._value_head is not None else {}
        moments = load_file(_need(directory / _MOMENTS)) if self._optimizer is not None else {}
        if self._optimizer is not None:
            check_optimizer(self._optimizer, moments)
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(fresh[name])
            if self._value_head is not None:
                self._value_head.weight.copy_(head[VALUE_HEAD])
        if self._optimizer is not None:
            restore_optimizer(self._optimizer, self._names, moments)
        self.num_steps = int(state["num_steps"])
        self.weight_update = WeightUpdate()

    @staticmethod
    def export(source: Path, target: Path) -> None:
        """Copy the model, which `save` wrote in this layout, without files that only training needs."""
        _need(source / "config.json")
        for file in (*source.glob("*config.json"), *source.glob("*.safetensors*")):
            shutil.copyfile(file, target / file.name)

    @staticmethod
    def data_parallel(config: LocalConfig, *, model: ModelConfig, world_size: int, device: str) -> int:
        """Return the number of devices: each gets its own rows.

        Raises:
            ModelError: packing does not support the positions or the attention of this model.
        """
        hf_config = read_config(check_directory(model.path))
        check_positions(hf_config, model.path)
        attention.check_kind(hf_config)
        return world_size

    @staticmethod
    def frees_device(config: LocalConfig) -> bool:
        """Return True: the model can be offloaded."""
        return True

    def offload(self) -> None:
        self._move("cpu")

    def reload(self) -> None:
        self._move(str(self.device))

    def _outputs(self, batch: Batch, temperature: float) -> TokenOutputs:
        targets = Targets.of(batch)
        found: Sequence[Tensor] = ()
        if len(targets.ids):
            packing = Packing(batch.lengths.tolist(), self.device)
            with self._autocast():
                hidden = hidden_states(self._model, batch["input_ids"][None], packing).index_select(0, targets.before)
                if self._value_head is None:
                    found = self._token_head(hidden, targets.ids, temperature)
            if self._value_head is not None:  # outside autocast: values are float32
                found = self._value_head(hidden.float()).t()
        return targets.outputs(self.output_names, found)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.model_config.precision == "bfloat16":
            return torch.autocast(self.device.type, torch.bfloat16)
        return nullcontext()

    def _make_value_head(self) -> nn.Linear:
        hidden_size = self._model.config.get_text_config().hidden_size
        head = nn.Linear(hidden_size, 1, bias=False)
        with torch.no_grad():
            head.weight.copy_(initial_value_head(hidden_size, Path(self.model_config.path), self.context.seed))
        return head.to(self.device)

    def _trained_parameters(self) -> dict[nn.Parameter, str]:
        named = dict(self._model.named_parameters())
        if self._value_head is not None:
            embedding = self._model.get_output_embeddings().weight
            tied = embedding is self._model.get_input_embeddings().weight
            named = {
                name: p for name, p in named.items() if tied or p is not embedding
            }  # a value model predicts no tokens
            named[VALUE_HEAD] = self._value_head.weight
        return {parameter: name for name, parameter in named.items()}

    def _sum_gradients(self) -> None:
        """Sum gradients over ranks; a rank without rows adds zeros."""
        if self.mesh.world_size == 1:
            return
        for parameter in self._names:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        flat = torch.cat([parameter.grad.reshape(-1) for parameter in self._names if parameter.grad is not None])
        dist.all_reduce(flat)
        for parameter, part in zip(self._names, torch.split(flat, [parameter.numel() for parameter in self._names])):
            parameter.grad = part.view_as(parameter)

    def _move(self, device: str) -> None:
        if self.device.type == "cpu":
            return
        self._model.to(device)
        if self._value_head is not None:
            self._value_head.to(device)
        for state in self._optimizer.state.values() if self._optimizer is not None else ():
            for key, tensor in state.items():
                state[key] = tensor.to(device)
        if device == "cpu":
            torch.cuda.empty_cache()


def _need(path: Path) -> Path:
    if not path.is_file():
        raise ModelError(f"{path.parent} is an incomplete checkpoint: {path.name} is missing\nNothing was loaded.")
    return path
