"""Low-rank adapters with peft: W is frozen, and the model computes with W + scaling · B A.

The scaling is alpha / rank, or alpha / √rank with lora_rslora.

In peft, W is named "….q_proj.base_layer.weight", and the factors "….q_proj.lora_A.default.weight" (A [r, in]) and
"….q_proj.lora_B.default.weight" (B [out, r]). `plain_name` returns the name of W in the model files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from rlcore.errors import ConfigError, ModelError
from rlcore.registry.versions import check_versions
from rlcore_fsdp.config import FSDPConfig
from rlcore_fsdp.load import own_part

ADAPTER = "default"
_FILES = ("adapter_config.json", "adapter_model.safetensors")
_PREFIX = "base_model.model."
_OTHER_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")
"""Initializations of peft that change W, to which the adapters then belong."""
_UNSUPPORTED = ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "layers_to_transform", "use_qalora")


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
        use_rslora=config.lora_rslora,
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


def check_start(names: Iterable[str], config: FSDPConfig) -> None:
    """Check that the adapters in lora_path have the rank, alpha, scaling and targets of the settings.

    Args:
        names: names of the parameters of the model that belong to adapters.

    Raises:
        ModelError: files are missing or damaged, or adapters of another kind.
        ConfigError: they differ from the settings.
    """
    directory = Path(config.lora_path).expanduser()
    if absent := [name for name in _FILES if not (directory / name).is_file()]:
        raise ModelError(
            f"lora_path={config.lora_path} has no {' and no '.join(absent)}\n"
            "It must be a directory with adapters in peft's format:  model.save_pretrained(DIR)"
        )
    try:
        described = json.loads((directory / _FILES[0]).read_text())
        with safe_open(directory / _FILES[1], "pt") as file:
            stored = {_name_here(key) for key in file.keys()}  # noqa: SIM118
        rank, alpha = int(described["r"]), float(described["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ModelError(
            f"lora_path={config.lora_path} cannot be read: {type(error).__name__}: {error}\n"
            "Copy the whole directory again."
        ) from error
    unsupported = [name for name in _UNSUPPORTED if described.get(name)]
    initial = str(described.get("init_lora_weights", "")).lower()
    unsupported += [f"init_lora_weights={initial}"] if initial.startswith(_OTHER_BASE) else []
    unsupported += ["bias"] if described.get("bias", "none") != "none" else []
    if unsupported:
        raise ModelError(
            f"lora_path={config.lora_path}: adapters with {', '.join(unsupported)} are not supported\n"
            "Merge them into the model, and give its directory:  model.merge_and_unload().save_pretrained(DIR)"
        )
    rslora = bool(described.get("use_rslora"))
    wanted = (config.lora_rank, config.lora_alpha or config.lora_rank, config.lora_rslora)
    if (rank, alpha, rslora) != wanted or stored != set(names):
        targets = ",".join(sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in stored}))
        words = [f"backend.lora_rank={rank}", f"backend.lora_alpha={alpha:g}", f"backend.lora_targets=[{targets}]"]
        words += ["backend.lora_rslora=true"] if rslora else []
        raise ConfigError(
            f"lora_path={config.lora_path} has adapters of other settings, or of another model\nType  {' '.join(words)}"
        )


def read_adapters(parameters: dict[str, Tensor], config: FSDPConfig) -> None:
    """Fill the adapters from lora_path; each rank reads its part.

    Raises:
        UserError: as `check_start`, or the shapes are those of another model.
    """
    check_start(parameters, config)
    with safe_open(Path(config.lora_path).expanduser() / _FILES[1], "pt") as file, torch.no_grad():
        for key in file.keys():  # noqa: SIM118
            parameter: Any = parameters[_name_here(key)]
            stored = file.get_tensor(key)
            if stored.shape != parameter.shape:
                raise ModelError(
                    f"lora_path={config.lora_path}: {key} has shape {list(stored.shape)}, but the model needs"
                    f" {list(parameter.shape)}\nGive the model that the adapters belong to:  model.path=DIR"
                )
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            local.copy_(stored[own_part(parameter)])


def _name_here(key: str) -> str:
    """Return the name of a factor in the model, of its name in peft's files."""
    layer, _, factor = key.removeprefix(_PREFIX).rpartition(".lora_")
    return f"{layer}.lora_{factor.partition('.')[0]}.{ADAPTER}.weight"


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
    """Yield the factors as "….q_proj.lora_A.weight" and "….q_proj.lora_B.weight", with B multiplied by the scaling.

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
    renamed = {f"{_PREFIX}{name.replace(f'.{ADAPTER}.', '.')}": tensor for name, tensor in factors.items()}
    save_file(renamed, target / "adapter" / "adapter_model.safetensors")


def scaling_of(config: FSDPConfig) -> float:
    """Return alpha / rank, or alpha / √rank with lora_rslora."""
    over = config.lora_rank**0.5 if config.lora_rslora else config.lora_rank
    return (config.lora_alpha or config.lora_rank) / over
