"""AdamW with moments in 8 bits (Dettmers et al. 2022, arXiv 2110.02861) by torchao's kernel, and their state as float32.

A moment is 256 values at a time: a scale, and a code for each. In checkpoints both are float32 tensors of the parameter's
shape, KEY with the values and KEY_scale: on as many ranks the codes come back bit for bit, on another number, whose
blocks lie elsewhere, the values are coded anew. A shard below 4,096 values keeps its moments in float32; its scale is 0.

torchao's own optimiser is not used: its compiled code for a DTensor is kept by the shape of the whole, and fails where
two ranks of one machine have shards of different sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlcore.protocols.backend import OptimizerConfig
from rlcore.registry.versions import check_versions

_SCALE = "_scale"
_BLOCK, _SMALLEST = 256, 4096


def check_installed() -> None:
    """Raises: ConfigError: torchao is not installed."""
    check_versions("rlcore-fsdp", "backend.optimizer=adamw_8bit", "eight-bit")


class AdamW8bit(torch.optim.Optimizer):
    """State of a parameter: its steps, and the moments of this rank's shard."""

    def __init__(self, parameters: list[nn.Parameter], config: OptimizerConfig) -> None:
        check_installed()
        super().__init__(parameters, {"lr": config.lr})
        self._config = config

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        from torchao.optim.adam import single_param_adam

        update: Any = torch.compile(single_param_adam, fullgraph=True, dynamic=False)
        (beta1, beta2), decay, eps = self._config.betas, self._config.weight_decay, self._config.eps
        with torch._dynamo.utils.disable_cache_limit():
            for group in self.param_groups:
                lr = torch.tensor(float(group["lr"]))
                for parameter in group["params"]:
                    shard = local_part(parameter)
                    if parameter.grad is None or not shard.numel():
                        continue
                    state = self.state[parameter]
                    if not state:
                        moments = {key: new_moment(shard, signed=key == "exp_avg") for key in ("exp_avg", "exp_avg_sq")}
                        state.update({"step": torch.tensor(0.0)} | moments)
                    state["step"] += 1
                    update(
                        shard.detach(),
                        local_part(parameter.grad),
                        state["step"],
                        state["exp_avg"],
                        state["exp_avg_sq"],
                        None,  # amsgrad
                        lr,
                        beta1,
                        beta2,
                        decay,
                        eps,
                        True,  # decoupled weight decay
                        False,  # stochastic rounding
                    )


def new_moment(shard: Tensor, *, signed: bool) -> Any:
    """Zeros, in codes if the shard is large enough."""
    from torchao.optim.subclass_8bit import OptimState8bit

    if shard.numel() < _SMALLEST or shard.numel() % _BLOCK:
        return torch.zeros_like(shard)
    return OptimState8bit.zeros(shard.shape, signed, _BLOCK, shard.device)


def unpacked(parameter: Tensor, key: str, moment: Any) -> dict[str, Tensor]:
    """A moment in plain tensors, sharded as the parameter is."""
    if not is_coded(moment):
        return {key: _laid_as(parameter, moment), key + _SCALE: _laid_as(parameter, torch.zeros_like(moment))}
    scale = moment.scale.repeat_interleave(_BLOCK).view(moment.shape)
    return {key: _laid_as(parameter, moment.dequantize()), key + _SCALE: _laid_as(parameter, scale)}


@torch.no_grad()
def packed(parameter: Tensor, state: Mapping[str, Tensor]) -> dict[str, Any]:
    """The inverse of `unpacked`, for all moments of a parameter; those of another optimiser have no scale."""
    from torchao.optim.quant_utils import quantize_8bit_with_qmap

    made = {}
    for key, values in state.items():
        if is_scale(key):
            continue
        moment = made[key] = new_moment(local_part(parameter), signed=key == "exp_avg")
        own, scale = local_part(values), local_part(state.get(key + _SCALE, values * 0.0))
        blocks = scale.reshape(-1, _BLOCK) if is_coded(moment) else scale.new_zeros(1, 1)
        if bool((blocks > 0).all() and (blocks == blocks[:, :1]).all()):
            moment.scale.copy_(blocks[:, 0])
            moment.codes.copy_(quantize_8bit_with_qmap(own / scale, moment.qmap))
        else:
            moment.copy_(own)
    return made


def is_scale(key: str) -> bool:
    """Whether a tensor of a checkpoint is for this optimiser alone."""
    return key.endswith(_SCALE)


def is_coded(moment: Any) -> bool:
    """Whether a moment is in 8 bits."""
    return hasattr(moment, "codes")


def local_part(tensor: Tensor) -> Tensor:
    """This rank's shard, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _laid_as(parameter: Tensor, local: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        shape=parameter.shape,
        stride=parameter.stride(),
        run_check=False,
    )
