"""Low-rank adapters with peft: W is frozen, and the model computes with W + alpha / rank · B A.

In peft, W is named "….q_proj.base_layer.weight", and the factors "….q_proj.lora_A.default.weight" (A [r, in]) and
"….q_proj.lora_B.default.weight" (B [out, r]). `plain_name` returns the name of W in the model files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from rlcore.errors import ConfigError
from rlcore.registry.versions import check_versions
from rlcore_fsdp.config import FSDPConfig
from rlcore_fsdp.load import own_part

ADAPTER = "default"


def add_adapters(model: Any, config: FSDPConfig) -> None:
    """Add adapters to a model in place, and freeze everything else.

    Raises:
        ConfigError: lora_targets does not name linear modules.
    """
    check_versions("rlcore-fsdp", "backend=fsdp", "lora")
    import peft

    _check_targets(model, config)
    peft.inject_adapter_in_model(adapter_config(config), model, ADAPTER)


def _check_targets(model: Any, config: FSDPConfig) -> None:
    modules = dict(model.named_modules())
    output = model.get_output_embeddings()
    linear = {name for name, module in modules.items() if isinstance(module, nn.Linear) and module is not output}
    names = ",".join(sorted({name.rpartition(".")[2] for name in linear}))
    for target in config.lora_targets:
        if target == "all-linear" and len(config.lora_targets) == 1:  # peft includes GPT-2's Conv1D, with W transposed
            named = linear | {name for name, module in modules.items() if type(module).__name__ == "Conv1D"}
        else:
            named = {name for name in modules if f".{name}".endswith(f".{target}")}
        if not named or named - linear:
            raise ConfigError(
                f"lora_targets: {target} is not a linear module of {type(model).__name__} that can have an adapter\nType  "
                + (f"backend.lora_targets=[{names}]  or some of them" if names else "backend.lora_rank=0")
            )


def adapter_config(config: FSDPConfig) -> Any:
    """Return the configuration of the adapters for peft."""
    import peft

    targets = config.lora_targets
    return peft.LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha or config.lora_rank,  # a float works too
        target_modules="all-linear" if targets == ("all-linear",) else list(targets),
        task_type="CAUSAL_LM",
    )


def is_adapter(name: str) -> bool:
    """Return whether a parameter belongs to an adapter."""
    return ".lora_" in name


def plain_name(name: str) -> str:
    """Return the name that the parameter has in a model without adapters."""
    return name.replace(".base_layer.", ".")


@torch.no_grad()
def start_adapters(parameters: dict[str, Tensor], seed: int) -> None:
    """Initialize A uniformly in ±1/√in and B with zeros, from name and seed: the same on any number of ranks."""
    for name, parameter in parameters.items():
        local: Any = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if ".lora_B." in name:
            local.zero_()
            continue
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        bound = parameter.shape[1] ** -0.5
        whole = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
        local.copy_(whole[own_part(parameter)])


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Turn the adapters off inside the context, which gives the model before training without a second copy."""
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "lora_A")]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merged(whole: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Return W + scaling · B A, computed in float32, in the type of W."""
    return (whole.float() + scaling * (b.float() @ a.float())).to(whole.dtype)


def sent_alone(factors: Iterator[tuple[str, Tensor]], config: FSDPConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield the factors as "….q_proj.lora_A.weight" and "….q_proj.lora_B.weight", with B multiplied by alpha / rank.

    The receiver adds B A to W.
    """
    for name, tensor in factors:
        scaling = scaling_of(config) if ".lora_B." in name else 1.0
        yield name.replace(f".{ADAPTER}.", "."), tensor * scaling


def export_adapters(model_path: str, adapter: dict[str, Any], factors: dict[str, Tensor], target: Path) -> None:
    """Write the merged model to `target`, and the adapters in peft's format to `target`/adapter."""
    from rlcore.models.load import load_model

    config = FSDPConfig(**(adapter | {"lora_targets": tuple(adapter["lora_targets"])}))
    model = load_model(model_path)
    scaling = scaling_of(config)
    with torch.no_grad():
        for name, a in factors.items():
            if ".lora_A." not in name:
                continue
            layer, _, _ = name.partition(".lora_A.")
            weight = model.get_parameter(f"{layer}.weight")
            weight.copy_(merged(weight, a, factors[name.replace(".lora_A.", ".lora_B.")], scaling))
    model.save_pretrained(target)
    (target / "adapter").mkdir()
    described = adapter_config(config)
    described.base_model_name_or_path = model_path
    described.save_pretrained(target / "adapter")
    renamed = {f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": tensor for name, tensor in factors.items()}
    save_file(renamed, target / "adapter" / "adapter_model.safetensors")


def scaling_of(config: FSDPConfig) -> float:
    """Return alpha / rank."""
    return (config.lora_alpha or config.lora_rank) / config.lora_rank
