"""Tensor parallelism of attention and MLP, following the plan of a model family in transformers.

Embedding and output are not split over the tensor axis (only FSDP shards them): every rank of a tensor group computes
the log-probs of its samples, and parameters that are not split have the same gradient on all ranks. The exception are
norms over the heads of a rank (Qwen3): each rank has a part of their gradient, and the parts are summed once before each
optimizer step.
"""

from __future__ import annotations

import fnmatch
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from rlcore.errors import ModelError
from rlcore.kits.backend.grid import check_divides
from rlcore_fsdp import lora

_STYLES: dict[str, type[ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
_PARTIAL = "replicated_with_grad_allreduce"


def cut(model: Any, mesh: DeviceMesh) -> set[str]:
    """Split the layers in place; the model may be on the meta device.

    Returns:
        Names of the parameters whose gradients must be summed over the tensor axis.

    Raises:
        ModelError: the family has no plan, or one with unsupported parts.
    """
    plan = plan_of(model.config)
    styles: dict[str, Any] = {}
    for name, module in model.base_model.named_modules():
        kind = next((kind for pattern, kind in plan.items() if fnmatch.fnmatch(name, pattern)), "")
        if kind in _STYLES:
            styles |= {part: _STYLES[kind]() for part in _parts(name, module, kind)}
    parallelize_module(model.base_model, mesh, styles)
    partial = [name for name, kind in plan.items() if kind == _PARTIAL]
    return {
        name
        for name, _ in model.named_parameters()
        if any(fnmatch.fnmatch(name, f"*{pattern}.weight") for pattern in partial)
    }


def _parts(name: str, module: Any, kind: str) -> list[str]:
    """Return the modules to split: a linear module itself, or its base layer and one factor of its adapter.

    That factor has the dimension along which W is split. The other one is replicated and sees full activations, so its
    gradient is the same on all ranks.
    """
    if not hasattr(module, "lora_A"):
        return [name]
    return [f"{name}.base_layer", f"{name}.lora_{'B' if kind == 'colwise' else 'A'}.{lora.ADAPTER}"]


def check_sizes(config: Any, size: int) -> None:
    """Check that `size` divides heads and MLP.

    Raises:
        ConfigError: it does not; the message lists the sizes that do.
    """
    mlp = getattr(config, "intermediate_size", None)
    check_divides("tensor_parallel", size, heads_of(config) | ({"intermediate_size": mlp} if mlp else {}))


def heads_of(config: Any) -> dict[str, int]:
    """Return name -> number of heads in a text configuration."""
    names = ("num_attention_heads", "num_key_value_heads")
    return {name: heads for name in names if (heads := getattr(config, name, None))}


def plan_of(config: Any) -> dict[str, str]:
    """Return pattern of module names -> style of the split.

    Raises:
        ModelError: the family has no plan, or one with unsupported parts.
    """
    plan: dict[str, str] = dict(getattr(config.get_text_config(), "base_model_tp_plan", None) or {})
    of_layers = {name: kind for name, kind in plan.items() if name.startswith("layers.")}
    unknown = sorted({kind for kind in of_layers.values() if kind not in _STYLES and kind != _PARTIAL})
    if not of_layers or unknown:
        supported = "which backend=fsdp does not support" if unknown else "which backend=fsdp needs"
        reason = f"a plan with {', '.join(unknown)}" if unknown else "no plan"
        raise ModelError(
            f"tensor_parallel: {(config.architectures or [config.model_type])[0]} has {reason} in transformers,"
            f" {supported}\nType  backend.tensor_parallel=1"
        )
    return of_layers
