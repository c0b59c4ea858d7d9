"""Settings of `rollout=vllm`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from rlcore.errors import require
from rlcore.kits.engine.config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMConfig(EngineConfig):
    """Settings of an engine in the rollout's own process, or of the connection to a running server.

    `engine_options` are arguments of vLLM's `EngineArgs`.
    """

    ENGINE: ClassVar = "vLLM"
    SERVE: ClassVar = "rlcore_vllm.serve"
    SET_BY_RLCORE: ClassVar = {
        "model": "model.path",
        "dtype": "model.precision",
        "max_num_seqs": "rollout.max_batch_size",
        "max_model_len": "rollout.max_model_len",
        "enable_prefix_caching": "rollout.prefix_caching",
        "enforce_eager": "rollout.enforce_eager",
        "tensor_parallel_size": "rollout.tensor_parallel",
        "gpu_memory_utilization": "rollout.gpu_memory_utilization",
        "kv_cache_memory_bytes": "rollout.kv_cache_gb",
        "enable_lora": "rollout.lora_rank",
        "max_loras": "rollout.lora_rank",
        "max_lora_rank": "rollout.lora_rank",
        **dict.fromkeys(("data_parallel_size", "pipeline_parallel_size"), "pools.rollout.devices_per_node"),
        **dict.fromkeys(("seed", "enable_sleep_mode", "generation_config", "logprobs_mode"), ""),
        **dict.fromkeys(("worker_extension_cls", "weight_transfer_config", "distributed_executor_backend"), ""),
        "trust_remote_code": "",
    }

    lora_rank: int = 0
    """Maximum rank of LoRA adapters. Above 0, the engine keeps the model in model.path and receives only adapters, as
    backend=fsdp sends them with backend.lora_sync=adapters."""
    pause: Literal["retract", "in_place"] = "retract"
    """Treatment of sequences in flight when new weights arrive. retract: recompute their KV cache under the new weights;
    in_place: continue with the KV cache of the old weights, which requests that arrive meanwhile may also reuse."""
    weights: Literal["files", "broadcast"] = "files"
    """With `url`: weight-transfer method. files: through `weights_directory`; broadcast: over the network, in a process
    group with the server's ranks (gloo, or NCCL if this host has a GPU too)."""

    def __post_init__(self) -> None:
        EngineConfig.__post_init__(self)  # super() fails here, because slots=True replaces the class
        require(0 <= self.lora_rank <= 512, "lora_rank", "0 (full models) to 512", self.lora_rank, 16)
        alone = self.lora_rank > 0 and bool(self.url)
        require(not alone, "lora_rank", "0 with rollout.url, as servers receive full models", self.lora_rank, 0)
