"""AdamW with 8-bit moments (Dettmers et al. 2022, arXiv 2110.02861), using torchao's kernel; checkpoints are float32.

Moments are quantized in blocks of 256 values: one scale, and a code per value. A checkpoint stores both as float32
tensors of the parameter's shape, KEY (values) and KEY_scale. On the same number of ranks the codes are restored bit for
bit; on another number, where the blocks differ, the values are quantized again. A shard with fewer than 4,096 values
keeps its moments in float32, with scale 0.

torchao's own optimizer is not used: it caches compiled code for a DTensor by the global shape, and fails when two ranks
of one machine have shards of different sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rlcore.protocols.backend import OptimizerConfig
from rlcore.registry.versions import check_versions
from rlcore_fsdp.load import laid_as, local_part

_SCALE = "_scale"
_BLOCK, _SMALLEST = 256, 4096


def check_installed() -> None:
    """Check that torchao is installed.

    Raises:
        ConfigError: it is not.
    """
    check_versions("rlcore-fsdp", "backend.optimizer=adamw_8bit", "eight-bit")


class AdamW8bit(torch.optim.Optimizer):
    """AdamW over shards; the state of a parameter is its step count and the moments of this rank's shard."""

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
    """Return a zero moment, in 8 bits if the shard is large enough."""
    from torchao.optim.subclass_8bit import OptimState8bit

    if shard.numel() < _SMALLEST or shard.numel() % _BLOCK:
        return torch.zeros_like(shard)
    return OptimState8bit.zeros(shard.shape, signed, _BLOCK, shard.device)


def unpacked(parameter: Tensor, key: str, moment: Any) -> dict[str, Tensor]:
    """Return a moment as plain tensors with the parameter's sharding."""
    if not is_coded(moment):
        return {key: laid_as(parameter, moment), key + _SCALE: laid_as(parameter, torch.zeros_like(moment))}
    scale = moment.scale.repeat_interleave(_BLOCK).view(moment.shape)
    return {key: laid_as(parameter, moment.dequantize()), key + _SCALE: laid_as(parameter, scale)}


@torch.no_grad()
def packed(parameter: Tensor, state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Invert `unpacked` for all moments of a parameter; moments from another optimizer have no scale."""
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
    """Return whether a checkpoint tensor is a scale, which only this optimizer uses."""
    return key.endswith(_SCALE)


def is_coded(moment: Any) -> bool:
    """Return whether a moment is stored in 8 bits."""
    return hasattr(moment, "codes")
