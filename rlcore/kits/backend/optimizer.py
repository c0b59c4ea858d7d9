"""The optimizer, its learning-rate schedule and its state as plain tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from rlcore.errors import ConfigError
from rlcore.protocols.backend import OptimizerConfig


def lr_at(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of optimizer step `step`, from 0: linear warm-up, then decay to lr · min_lr_ratio."""
    warmup = config.warmup_steps or math.ceil(round(config.warmup_ratio * total_steps, 6))
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.schedule == "constant" or total_steps <= warmup:
        return config.lr
    done = min(1.0, (step - warmup) / (total_steps - warmup))
    share = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * share)


def make_optimizer(parameters: ParamsT, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Create the optimizer for parameters or groups of them; AdamW is fused."""
    if config.name == "sgd":
        return torch.optim.SGD(parameters, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)
    return torch.optim.AdamW(
        parameters, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay, fused=True
    )


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> dict[str, Tensor]:
    """Return the optimizer's state, each tensor under "parameter/key"."""
    return {
        f"{name}/{key}": value
        for parameter, name in names.items()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def check_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Check that the state that `optimizer_tensors` returned is of the same kind of optimizer.

    Raises:
        ConfigError: it is of the other one.
    """
    saved = {"exp_avg": "adamw", "momentum_buffer": "sgd"}
    now = "sgd" if isinstance(optimizer, torch.optim.SGD) else "adamw"
    names = (saved.get(key.rpartition("/")[2], now) for key in tensors)
    if before := next((name for name in names if name != now), None):
        raise ConfigError(
            f"optimizer.name={now}: the checkpoint has the state of {before}\n"
            f"Type  optimizer.name={before}   (of a critic: critic.optimizer.name={before})"
        )


def restore_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str], tensors: Mapping[str, Tensor]
) -> None:
    """Restore the state that `optimizer_tensors` returned."""
    by_name = {name: parameter for parameter, name in names.items()}
    optimizer.state.clear()
    for key, tensor in tensors.items():
        name, _, part = key.rpartition("/")
        parameter = by_name[name]
        # the fused kernel needs the whole state, including the step counter, on the parameter's device
        optimizer.state[parameter][part] = tensor.to(parameter.device).clone()
