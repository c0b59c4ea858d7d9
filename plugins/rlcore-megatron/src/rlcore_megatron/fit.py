"""Checks that settings, devices and model fit together, for the plan and again on each rank; no megatron-core needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlcore.errors import ConfigError
from rlcore.kits.backend import grid
from rlcore.models.load import check_directory, read_config
from rlcore.protocols.backend import ModelConfig
from rlcore.registry.versions import check_versions
from rlcore_megatron.config import MegatronConfig
from rlcore_megatron.families import Family, family_of
from rlcore_megatron.rope import frequencies


def data_parallel_size(
    config: MegatronConfig, families: Mapping[str, Family], model: ModelConfig, *, world_size: int, device: str
) -> int:
    """Return the number of data-parallel ranks, which get different rows.

    Raises:
        UserError: no CUDA, a missing package, a model without a table, or sizes that do not divide.
    """
    if device == "cpu":
        raise no_cuda("the pool has CPUs")
    check_installed(config, model.precision)
    check_sizes(config, world_size)
    hf_config = read_config(check_directory(model.path))
    family_of(hf_config, families, model.path)
    check_divides(hf_config, config)
    frequencies(hf_config, model.path)
    return world_size // (config.tensor_parallel * config.pipeline_parallel * config.context_parallel)


def no_cuda(reason: str) -> ConfigError:
    """Return the error for a missing CUDA device."""
    return ConfigError(
        "backend=megatron needs CUDA devices: megatron-core, its distributed optimizer and Transformer Engine allocate on"
        f" them by name; {reason}\nType  backend=fsdp  or  backend=local"
    )


def check_installed(config: MegatronConfig, precision: str) -> None:
    """Check that megatron-core, and Transformer Engine if a setting needs it, are installed and support the settings.

    Raises:
        ConfigError: they are not, or do not.
    """
    check_versions("rlcore-megatron", "backend=megatron")
    if not config.fp8 and config.layers != "transformer_engine":
        return
    needs = "layers=transformer_engine" if config.layers == "transformer_engine" else f"fp8={config.fp8}"
    if precision == "float32":
        raise ConfigError(
            f"backend=megatron with {needs} computes in bfloat16, but model.precision=float32\n"
            "Type  model.precision=bfloat16  or  backend.layers=local backend.fp8=''"
        )
    if not config.uses_transformer_engine(precision):
        raise ConfigError(
            f"backend=megatron with {needs} needs Transformer Engine, which is not installed\n"
            "Type  pip install --no-build-isolation 'transformer-engine[pytorch]'  or  backend.layers=local backend.fp8=''"
        )


def check_sizes(config: MegatronConfig, world_size: int) -> None:
    """Check that the sizes of the grid divide the number of devices.

    Raises:
        ConfigError: they do not; the message lists numbers that fit.
    """
    sizes = {name: getattr(config, name) for name in ("tensor_parallel", "pipeline_parallel", "context_parallel")}
    grid.check_devices(world_size, sizes)
    if (world_size // config.pipeline_parallel) % config.expert_parallel:
        stage = world_size // config.pipeline_parallel
        divisors = ", ".join(str(size) for size in range(1, stage + 1) if stage % size == 0)
        raise ConfigError(
            f"expert_parallel={config.expert_parallel} does not divide the {stage} devices of a pipeline stage\n"
            f"Type  backend.expert_parallel=N  with N one of {divisors}"
        )


def check_divides(hf_config: Any, config: MegatronConfig) -> None:
    """Check that the sizes of the grid divide heads, layers and experts.

    Raises:
        ConfigError: they do not; the message lists the sizes that do.
    """
    sizes = {
        "num_attention_heads": hf_config.num_attention_heads,
        "num_key_value_heads": hf_config.num_key_value_heads,
        "intermediate_size": hf_config.intermediate_size,
    }
    grid.check_divides("tensor_parallel", config.tensor_parallel, sizes)
    each = {name: sizes[name] // config.tensor_parallel for name in ("num_attention_heads", "num_key_value_heads")}
    grid.check_divides("context_parallel", config.context_parallel, each, "of a tensor-parallel device")
    stages = config.pipeline_parallel * config.virtual_stages
    layers = hf_config.num_hidden_layers
    given = {"first_stage_layers": config.first_stage_layers, "last_stage_layers": config.last_stage_layers}
    ends = {name: size for name, size in given.items() if size}
    if ends:
        _check_ends(ends, layers, stages - len(ends))
    elif layers % stages and config.virtual_stages > 1:
        fits = ", ".join(str(n) for n in range(1, layers + 1) if layers % n == 0)
        raise ConfigError(
            f"pipeline_parallel · virtual_stages={stages} does not divide num_hidden_layers={layers} of this model\n"
            f"Type  backend.pipeline_parallel=N backend.virtual_stages=M  with a product of {fits}"
        )
    else:
        grid.check_divides("pipeline_parallel", stages, {"num_hidden_layers": layers})
    experts = getattr(hf_config, "num_experts", None)
    if config.expert_parallel > 1 and not experts:
        raise ConfigError(
            f"expert_parallel={config.expert_parallel}, but {hf_config.model_type} has no experts\n"
            "Type  backend.expert_parallel=1"
        )
    if experts:
        grid.check_divides("expert_parallel", config.expert_parallel, {"num_experts": experts})
        if config.tensor_parallel > 1 and not (config.sequence_parallel and config.expert_parallel > 1):
            raise ConfigError(
                f"tensor_parallel={config.tensor_parallel} of a mixture needs sequence_parallel=true and expert_parallel above 1\n"
                "Type  backend.sequence_parallel=true backend.expert_parallel=2"
            )


def _check_ends(ends: dict[str, int], layers: int, others: int) -> None:
    """Check that the other stages can split the remaining layers equally, with at least one layer each.

    Raises:
        ConfigError: they cannot.
    """
    name, *kept = ends

    def fits(size: int) -> bool:
        left = layers - size - sum(ends[other] for other in kept)
        return left >= others and left % others == 0 if others else left == 0

    if not fits(ends[name]):
        what = " and ".join(f"{end}={size}" for end, size in ends.items())
        possible = ", ".join(str(size) for size in range(1, layers + 1) if fits(size))
        advice = (
            f"backend.{name}=N  with N one of {possible}" if possible else "  ".join(f"backend.{e}=0" for e in ends)
        )
        raise ConfigError(
            f"{what}: the other stages ({others}) cannot split the rest of num_hidden_layers={layers} equally\n"
            f"Type  {advice}"
        )
