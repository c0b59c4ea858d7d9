"""The optimizer over sharded parameters: gradient norm, clipping, AdamW (also 8-bit) or Muon, and state as named tensors.

Parameters sharded over different meshes (FSDP only, or FSDP and tensor axis) cannot share one fused kernel, so they form
separate parameter groups. The gradient norm needs two numbers from each rank: one for gradients sharded by FSDP only,
and one for those sharded over both axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlcore.kits.backend.optimizer import make_optimizer
from rlcore.protocols.backend import OptimizerConfig
from rlcore_fsdp import eight_bit
from rlcore_fsdp.checkpoint import OPTIMIZER
from rlcore_fsdp.load import local_part
from rlcore_fsdp.mesh import Grid


class Optimizers:
    """AdamW, and Muon for the parameters named in `matrices`."""

    def __init__(
        self, names: Mapping[nn.Parameter, str], config: OptimizerConfig, matrices: set[str], *, in_8_bits: bool = False
    ) -> None:
        self._names = names
        self._in_8_bits = in_8_bits
        by_muon = [parameter for parameter, name in names.items() if name in matrices]
        by_adamw = [parameter for parameter, name in names.items() if name not in matrices]
        self._all: list[torch.optim.Optimizer] = []
        if in_8_bits:
            self._all.append(eight_bit.AdamW8bit(by_adamw, config))
        elif by_adamw:
            self._all.append(make_optimizer(_by_mesh(by_adamw), config))
        if by_muon:
            # scaled so that a step is as large as AdamW's, and both can use one learning rate
            self._all.append(
                torch.optim.Muon(
                    by_muon, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
                )
            )

    def step(self, lr: float) -> None:
        """Run one step, then drop the gradients."""
        for optimizer in self._all:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
        self.zero()

    def zero(self) -> None:
        """Drop the gradients."""
        for optimizer in self._all:
            optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """Return optimizer.KEY.NAME -> state tensor with the parameter's sharding."""
        return {
            f"{OPTIMIZER}{name}.{self._names[parameter]}": tensor
            for parameter, key, value in self._state()
            if value.dim()
            for name, tensor in self._plain(parameter, key, value).items()
        }

    def counters(self) -> dict[str, dict[str, float]]:
        """Return parameter name -> its counters, such as the number of steps."""
        found: dict[str, dict[str, float]] = {}
        for parameter, key, value in self._state():
            if not value.dim():
                found.setdefault(self._names[parameter], {})[key] = float(value)
        return found

    def empty_tensors(self, stored: Iterable[str]) -> dict[str, Tensor]:
        """Return zero tensors to load a checkpoint into, for those of the `stored` names that belong to this optimizer."""
        parameters = {name: parameter for parameter, name in self._names.items()}
        made = {}
        for name in stored:
            key, _, of_parameter = name.removeprefix(OPTIMIZER).partition(".")
            wanted = self._in_8_bits or not eight_bit.is_scale(key)
            if name.startswith(OPTIMIZER) and of_parameter in parameters and wanted:
                made[name] = torch.zeros_like(parameters[of_parameter].detach())
        return made

    def restore(self, tensors: Mapping[str, Tensor], counters: Mapping[str, Mapping[str, float]]) -> None:
        """Set the state from the results of `tensors` and `counters`."""
        parameters = {name: parameter for parameter, name in self._names.items()}
        owner = {
            parameter: optimizer
            for optimizer in self._all
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        for optimizer in self._all:
            optimizer.state.clear()
        for name, tensor in tensors.items():
            key, _, of_parameter = name.removeprefix(OPTIMIZER).partition(".")
            parameter = parameters[of_parameter]
            owner[parameter].state[parameter][key] = tensor
        for parameter, optimizer in owner.items() if self._in_8_bits else ():
            optimizer.state[parameter] = eight_bit.packed(parameter, optimizer.state[parameter])
        for of_parameter, counted in counters.items():
            parameter = parameters[of_parameter]
            for key, value in counted.items():
                owner[parameter].state[parameter][key] = torch.tensor(value, device=parameter.device)

    def to(self, device: str) -> None:
        """Move the state to a device."""
        for parameter, key, value in list(self._state()):
            for optimizer in self._all:
                if parameter in optimizer.state:
                    optimizer.state[parameter][key] = value.to(device)

    def _plain(self, parameter: nn.Parameter, key: str, value: Tensor) -> dict[str, Tensor]:
        return eight_bit.unpacked(parameter, key, value) if self._in_8_bits else {key: value}

    def _state(self) -> Iterable[tuple[Any, str, Tensor]]:
        for optimizer in self._all:
            for parameter, entries in optimizer.state.items():
                for key, value in entries.items():
                    yield parameter, key, value


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter], grid: Grid) -> Tensor:
    """Return the norm of all gradients, over all ranks."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    cut_once = [local_part(gradient) for gradient in gradients if not cut_by_tensor_axis(gradient)]
    cut_twice = [local_part(gradient) for gradient in gradients if cut_by_tensor_axis(gradient)]
    device = gradients[0].device if gradients else torch.device("cpu")
    squares = torch.stack([_square(cut_once, device), _square(cut_twice, device)])
    if grid.shard_group.size() > 1:
        all_reduce(squares, grid.shard_group)
    if grid.tensor is not None:
        of_axis = squares[1:].clone()
        all_reduce(of_axis, grid.tensor.get_group())
        squares = torch.cat([squares[:1], of_axis])
    return squares.sum().sqrt()


@torch.no_grad()
def clip(parameters: Iterable[nn.Parameter], norm: Tensor, limit: float) -> None:
    """Scale all gradients so that their norm is at most `limit`."""
    factor = float((limit / (norm + 1e-6)).clamp(max=1.0))
    if factor < 1.0:
        for parameter in parameters:
            if parameter.grad is not None:
                local_part(parameter.grad).mul_(factor)


@torch.no_grad()
def sum_over_tensor_axis(parameters: Iterable[nn.Parameter], grid: Grid) -> None:
    """Sum gradients of which each tensor-parallel rank has computed a part."""
    parts = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if grid.tensor is None or not parts:
        return
    flat = torch.cat([part.reshape(-1) for part in parts])
    all_reduce(flat, grid.tensor.get_group())
    for part, total in zip(parts, torch.split(flat, [part.numel() for part in parts])):
        part.copy_(total.view_as(part))


def cut_by_tensor_axis(tensor: Tensor) -> bool:
    """Return whether a parameter or gradient is sharded over the tensor axis."""
    return isinstance(tensor, DTensor) and "tensor" in (tensor.device_mesh.mesh_dim_names or ())


def all_reduce(tensor: Tensor, group: dist.ProcessGroup, op: Any = dist.ReduceOp.SUM) -> None:
    """All-reduce a tensor in place."""
    dist.all_reduce(tensor, op=op, group=group)


def _square(parts: list[Tensor], device: torch.device) -> Tensor:
    if not parts:
        return torch.zeros((), device=device)
    return torch.nn.utils.get_total_norm(parts).square().to(device)


def _by_mesh(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    groups: dict[bool, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(cut_by_tensor_axis(parameter), []).append(parameter)
    return [{"params": group} for group in groups.values()]
