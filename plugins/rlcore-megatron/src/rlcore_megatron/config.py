"""Settings of `backend=megatron`. Imports no megatron-core: `rlcore config` works where it is not installed."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal

from rlcore.errors import ConfigError, require


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronConfig:
    """How one model is laid over the devices. Devices of a pool = data · pipeline_parallel · context_parallel ·
    tensor_parallel; data is what the others leave."""

    tensor_parallel: int = 1
    """Devices that share the matrices of a layer and the vocabulary, and compute the same samples."""
    pipeline_parallel: int = 1
    """Devices that hold the layers one after the other; micro-batches move through them (1F1B)."""
    first_stage_layers: int = 0
    """Layers on the first device of a pipeline, which has the input embedding as well; 0: as many as the others."""
    last_stage_layers: int = 0
    """Layers on the last one, which computes the head as well; 0: as many as the others."""
    virtual_stages: int = 1
    """Pieces of the model on each device of a pipeline: less waiting, more communication."""
    expert_parallel: int = 1
    """Data-parallel devices that share the experts of a mixture instead of each holding all of them."""
    context_parallel: int = 1
    """Devices that share the tokens of each sample between layers, and the heads inside attention (Ulysses)."""
    lora_rank: int = 0
    """Refused above 0: megatron-core has no adapters."""
    sequence_parallel: bool = False
    """Norms and residuals are cut by tokens over the tensor-parallel devices: less memory for activations."""
    distributed_optimizer: bool = True
    """Moments and float32 parameters are sharded over the data-parallel devices."""
    recompute: Literal["full", "selective"] = "full"
    """With model.gradient_checkpointing: whole layers, or their attention alone."""
    layers: Literal["auto", "transformer_engine", "local"] = "auto"
    """Whose layers: Transformer Engine's, megatron-core's own, or Transformer Engine's where it is installed and
    model.precision is bfloat16, without which its packed attention cannot compute."""
    fp8: Literal["", "e4m3", "hybrid"] = ""
    """Handed to Transformer Engine; empty: no fp8."""
    weights_bucket_mb: int = 256
    """Weights on their way to the rollout that are gathered at a time, in megabytes of one device's part."""

    def __post_init__(self) -> None:
        sizes = ("tensor_parallel", "pipeline_parallel", "virtual_stages", "expert_parallel", "context_parallel")
        for name in (*sizes, "weights_bucket_mb"):
            require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name), 1)
        for name in ("first_stage_layers", "last_stage_layers"):
            value = getattr(self, name)
            require(value >= 0, name, "at least 0", value, 0)
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
                "sequence_parallel=true needs tensor_parallel above 1: it cuts over the tensor-parallel devices\n"
                "Type  backend.tensor_parallel=2  or  backend.sequence_parallel=false"
            )
        if self.virtual_stages > 1 and self.pipeline_parallel == 1:
            raise ConfigError(
                f"virtual_stages={self.virtual_stages} needs pipeline_parallel above 1\n"
                "Type  backend.pipeline_parallel=2  or  backend.virtual_stages=1"
            )
        if self.fp8 and self.layers == "local":
            raise ConfigError(
                f"fp8={self.fp8} needs the layers of Transformer Engine, and layers=local\n"
                "Type  backend.layers=transformer_engine  or  backend.fp8=''"
            )

    def uses_transformer_engine(self, precision: str) -> bool:
        """Whether the layers are Transformer Engine's."""
        installed = importlib.util.find_spec("transformer_engine") is not None
        return self.layers != "local" and precision == "bfloat16" and installed

    @property
    def token_multiple(self) -> int:
        """Tokens of a micro-batch are padded to a multiple of this: context and sequence parallelism cut equal parts, and
        matrices of fp8 have sides that 16 divides."""
        return self.context_parallel * (self.tensor_parallel if self.sequence_parallel else 1) * (16 if self.fp8 else 1)
