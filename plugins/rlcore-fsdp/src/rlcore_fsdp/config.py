"""Settings of `backend=fsdp`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlcore.errors import require, require_at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class FSDPConfig:
    """Layout of one model over devices. Devices of a pool = replicate · shard · context_parallel · tensor_parallel;
    shard follows from the other three."""

    replicate: int = 1
    """Copies of the model, each sharded over its own devices (HSDP). One copy per node keeps all-gathers inside a node."""
    tensor_parallel: int = 1
    """Number of devices that split the matrices of each layer and compute the same samples."""
    context_parallel: int = 1
    """Number of devices that split the tokens of a micro-batch (Ulysses), for samples too long for one device."""
    reshard_after_forward: bool = True
    """Free a layer's gathered parameters after its forward pass: less memory, one more all-gather in the backward pass."""
    reduce_gradients: Literal["every", "last"] = "every"
    """every: reduce gradients after each micro-batch, so that a device holds only its shard. last: reduce once per
    mini-batch; less communication, but until then each device holds the full float32 gradient (56 GiB for 15 B
    parameters)."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory; each layer is moved to the device to compute it."""
    compile: bool = False
    """Apply torch.compile to each layer."""
    layers: str = ""
    """Path of the list of layers in the model, such as "model.decoder.layers"; empty: detected."""
    optimizer: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    """adamw_8bit: AdamW with torchao's 8-bit moments, a quarter of the memory. muon: torch.optim.Muon for the matrices
    of the layers, AdamW for everything else."""
    lora_rank: int = 0
    """Rank of the low-rank adapters; above 0, only adapters are trained."""
    lora_alpha: float = 0.0
    """Adapters are scaled by alpha / rank; 0 means alpha = rank."""
    lora_rslora: bool = False
    """Scale adapters by alpha / √rank (rsLoRA, https://arxiv.org/abs/2312.03732) instead of alpha / rank."""
    lora_targets: tuple[str, ...] = ("all-linear",)
    """Names of the modules that get adapters, such as q_proj; all-linear: every linear module except the output."""
    lora_path: str = ""
    """Directory with adapters in peft's format to start from, of this rank, alpha and these targets; empty: B is zero. A
    reference model is still the model without adapters."""
    lora_sync: Literal["merged", "adapters"] = "merged"
    """Weights sent to the rollout engine. merged: the whole model. adapters: the adapters only, for an engine that
    applies them itself, such as rollout=vllm with rollout.lora_rank at least as high as lora_rank."""

    def __post_init__(self) -> None:
        require_at_least(self, replicate=1, tensor_parallel=1, context_parallel=1, lora_rank=0)
        alone = self.lora_sync == "adapters" and not self.lora_rank
        require(not alone, "lora_sync", "merged unless lora_rank is above 0", self.lora_sync, "merged")
        for name, given in (("lora_path", self.lora_path), ("lora_rslora", self.lora_rslora)):
            require(not given or self.lora_rank > 0, name, "nothing unless lora_rank is above 0", given, "")
        both = self.context_parallel > 1 and self.tensor_parallel > 1
        require(not both, "context_parallel", "1 when tensor_parallel is above 1", self.context_parallel, 1)
