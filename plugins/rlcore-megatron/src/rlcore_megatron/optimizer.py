"""megatron-core's optimizers: a step, and the state of one parameter as plain tensors of its shape.

megatron-core's own optimizer checkpoints are not used, because they are pickles and store state as flat buffers. Here
each parameter has `param` (float32), `exp_avg` and `exp_avg_sq`, gathered from the data-parallel devices that shard it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn

from rlcore.errors import ConfigError
from rlcore.protocols.backend import OptimizerConfig
from rlcore_megatron.config import MegatronConfig
from rlcore_megatron.grid import Grid
from rlcore_megatron.memory import HostCopy
from rlcore_megatron.model import Model

MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """Gradient buffers and optimizers of this rank's part of a model. Every method is collective."""

    def __init__(self, model: Model, config: MegatronConfig, optimizer: OptimizerConfig, grid: Grid) -> None:
        if optimizer.name != "adamw":
            raise ConfigError(
                f"optimizer.name={optimizer.name}: backend=megatron has AdamW only\nType  optimizer.name=adamw"
            )
        self._grid = grid
        self._entries = model.entries
        self._clip = optimizer.clip_grad_norm
        self.away: HostCopy | None = None
        """Host copy of the model and of `tensors`, while they are not on the device."""
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=config.distributed_optimizer
        )
        self.chunks = [DistributedDataParallel(model.config, ddp, chunk) for chunk in model.chunks]
        self._optimizer = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                lr=optimizer.lr,
                weight_decay=optimizer.weight_decay,
                adam_beta1=optimizer.betas[0],
                adam_beta2=optimizer.betas[1],
                adam_eps=optimizer.eps,
                clip_grad=optimizer.clip_grad_norm,
                bf16=model.config.bf16,
                params_dtype=model.config.params_dtype,
                use_distributed_optimizer=config.distributed_optimizer,
            ),
            self.chunks,
            config_overrides={},  # weight decay for all parameters, as in the other backends
            use_gloo_process_groups=False,
        )

    def step(self, lr: float) -> float | None:
        """Run a step, zero the gradients and return their norm, or None if it is not finite and the step was skipped."""
        finalize_model_grads(self.chunks)
        self._optimizer.prepare_grads()
        norm = float(self._optimizer.get_grad_norm())
        finite = math.isfinite(norm)
        if finite:
            if self._clip:
                for inner in self._all():
                    clip_grad_by_total_norm_fp32(inner.get_parameters(), self._clip, norm)
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step_with_ready_grads()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        return norm if finite else None

    def state(self, parameter: nn.Parameter, *, has_stepped: bool) -> dict[str, Tensor]:
        """Return param, exp_avg and exp_avg_sq in float32, with the parameter's shape; moments only after a step.

        Collective over the data-parallel devices that hold the parameter.
        """
        inner, parts = self._parts(parameter)
        names = ("param", *MOMENTS) if has_stepped else ("param",)
        if not isinstance(inner, DistributedOptimizer):
            return {name: self._here(parts[name]).to(parameter.device) for name in names}
        group = self._grid.expert_data if self._entries[parameter].is_expert else self._grid.data
        whole = {}
        for name in names:
            flat = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
            if parts:
                flat[self._range(inner, parameter)] = self._here(parts[name]).to(flat)
            dist.all_reduce(flat, group=group)
            whole[name] = flat.view_as(parameter)
        return whole

    @torch.no_grad()
    def restore(self, parameter: nn.Parameter, tensors: Mapping[str, Tensor], num_steps: int) -> None:
        """Set the state from the result of `state`; without moments, reset the optimizer."""
        self.set_parameter(parameter, tensors["param"])
        inner, parts = self._parts(parameter)
        if not parts:
            return
        main = parts["param"]
        state = inner.optimizer.state
        if MOMENTS[0] not in tensors:
            state.pop(main, None)
            return
        known = state.setdefault(main, {})
        for name in MOMENTS:
            own = tensors[name].to(main.device).reshape(-1)[self._range(inner, parameter)]
            known[name] = own.view_as(main).clone()
        if "step" in known or isinstance(inner.optimizer, torch.optim.AdamW):
            known["step"] = torch.tensor(float(num_steps))
        for group in inner.optimizer.param_groups:  # step count of fused optimizers
            group["step"] = num_steps

    @torch.no_grad()
    def set_parameter(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Set a parameter, and this rank's part of its float32 copy; the moments stay."""
        inner, parts = self._parts(parameter)
        self._here(parameter).copy_(value.view_as(parameter))
        if parts:
            main = self._here(parts["param"])
            main.copy_(value.reshape(-1)[self._range(inner, parameter)].view_as(main))

    def gradients(self) -> Iterator[Tensor]:
        """Yield the gradient buffers, which are zero after a step."""
        yield from (buffer.grad_data for buffer in self._buffers())

    def tensors(self) -> Iterator[Tensor]:
        """Yield the other tensors on the device: parameter buffers, float32 parameters and moments."""
        yield from (buffer.param_data for buffer in self._buffers() if buffer.param_data is not None)
        for inner in self._all():
            for group in inner.optimizer.param_groups:
                yield from group["params"]
            for state in inner.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))

    def _buffers(self) -> list[Any]:
        return [buffer for chunk in self.chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]

    def _all(self) -> list[Any]:
        chained = getattr(self._optimizer, "chained_optimizers", [self._optimizer])
        return [inner for inner in chained if not getattr(inner, "is_stub_optimizer", False)]

    def _parts(self, parameter: nn.Parameter) -> tuple[Any, dict[str, Tensor]]:
        """Return the optimizer of a parameter, and this rank's part of its state."""
        for inner in self._all():
            if isinstance(inner, DistributedOptimizer):
                if parameter in inner.model_param_group_index_map:
                    found = inner._get_main_param_and_optimizer_states(parameter)
                    return inner, {name: found[name] for name in ("param", *MOMENTS) if name in found}
                continue
            main = getattr(parameter, "main_param", parameter)
            if any(main is own for group in inner.optimizer.param_groups for own in group["params"]):
                state = inner.optimizer.state.get(main, {})
                return inner, {"param": main} | {name: state[name] for name in MOMENTS if name in state}
        sharded = next((inner for inner in self._all() if isinstance(inner, DistributedOptimizer)), None)
        assert sharded is not None or not self._all(), "parameter is not in any optimizer"
        return sharded, {}

    def _here(self, tensor: Tensor) -> Tensor:
        return tensor if self.away is None else self.away.of(tensor)

    @staticmethod
    def _range(inner: Any, parameter: nn.Parameter) -> slice:
        """Return the range of the flat parameter that this rank's optimizer updates."""
        if not isinstance(inner, DistributedOptimizer):
            return slice(None)
        own = inner._get_model_param_range_map(parameter)["param"]
        return slice(own.start, own.end)
