"""Settings of `backend=megatron`. Does not import megatron-core, so `rlcore config` works without it."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal

from rlcore.errors import ConfigError, require_at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronConfig:
    """Layout of one model over devices. Devices of a pool = data · pipeline_parallel · context_parallel ·
    tensor_parallel; data follows from the other three."""

    tensor_parallel: int = 1
    """Number of devices that split the matrices of each layer and the vocabulary, and compute the same samples."""
    pipeline_parallel: int = 1
    """Number of pipeline stages; each device of a pipeline holds some of the layers (1F1B schedule)."""
    first_stage_layers: int = 0
    """Layers on the first stage, which also holds the input embedding; 0: as many as on the other stages."""
    last_stage_layers: int = 0
    """Layers on the last stage, which also computes the head; 0: as many as on the other stages."""
    virtual_stages: int = 1
    """Number of model chunks on each device of a pipeline: smaller bubbles, more communication."""
    expert_parallel: int = 1
    """Number of data-parallel devices that the experts of a mixture are distributed over."""
    context_parallel: int = 1
    """Number of devices that split the tokens of each sample between layers, and the heads in attention (Ulysses)."""
    lora_rank: int = 0
    """Must be 0: megatron-core has no adapters."""
    sequence_parallel: bool = False
    """Split norms and residuals by tokens over the tensor-parallel devices: less memory for activations."""
    distributed_optimizer: bool = True
    """Shard moments and float32 parameters over the data-parallel devices."""
    recompute: Literal["full", "selective"] = "full"
    """Activations that model.gradient_checkpointing recomputes: those of full layers, or of attention only."""
    layers: Literal["auto", "transformer_engine", "local"] = "auto"
    """Implementation of the layers. local: megatron-core's own. auto: Transformer Engine's if it is installed and
    model.precision is bfloat16, which its packed attention needs."""
    fp8: Literal["", "e4m3", "hybrid"] = ""
    """fp8 format of Transformer Engine; empty: no fp8."""
    weights_bucket_mb: int = 256
    """Size of the buckets in which weights are gathered for the rollout engine, in megabytes per device."""

    def __post_init__(self) -> None:
        require_at_least(self, tensor_parallel=1, pipeline_parallel=1, virtual_stages=1, expert_parallel=1)
        require_at_least(self, context_parallel=1, weights_bucket_mb=1, first_stage_layers=0, last_stage_layers=0)
        for name in ("first_stage_layers", "last_stage_layers"):
            value = getattr(self, name)
            if value and (self.pipeline_parallel == 1 or self.virtual_stages > 1):
                raise ConfigError(
                    f"{name}={value} needs pipeline_parallel above 1 and virtual_stages=1\nType  backend.{name}=0"
                )
        if self.lora_rank:
            raise ConfigError(
                f"lora_rank={self.lora_rank}: megatron-core has no adapters\n"
                f"Type  backend=fsdp backend.lora_rank={self.lora_rank}  or  backend.lora_rank=0"
            )
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ConfigError(
                "sequence_parallel=true needs tensor_parallel above 1: it splits over the tensor-parallel devices\n"
                "Type  backend.tensor_parallel=2  or  backend.sequence_parallel=false"
            )
        if self.virtual_stages > 1 and self.pipeline_parallel == 1:
            raise ConfigError(
                f"virtual_stages={self.virtual_stages} needs pipeline_parallel above 1\n"
                "Type  backend.pipeline_parallel=2  or  backend.virtual_stages=1"
            )
        if self.fp8 and self.layers == "local":
            raise ConfigError(
                f"fp8={self.fp8} needs the layers of Transformer Engine, but layers=local\n"
                "Type  backend.layers=transformer_engine  or  backend.fp8=''"
            )

    def uses_transformer_engine(self, precision: str) -> bool:
        """Return whether the layers are Transformer Engine's."""
        installed = importlib.util.find_spec("transformer_engine") is not None
        return self.layers != "local" and precision == "bfloat16" and installed

    @property
    def token_multiple(self) -> int:
        """Multiple that the tokens of a micro-batch are padded to: context and sequence parallelism need equal parts,
        and fp8 needs dimensions divisible by 16."""
        return self.context_parallel * (self.tensor_parallel if self.sequence_parallel else 1) * (16 if self.fp8 else 1)
