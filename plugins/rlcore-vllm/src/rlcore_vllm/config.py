"""Settings of `rollout=vllm`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rlcore.errors import ConfigError, require

OURS = {
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
    **dict.fromkeys(("seed", "enable_sleep_mode", "generation_config", "logprobs_mode", "worker_extension_cls"), ""),
    **dict.fromkeys(("weight_transfer_config", "distributed_executor_backend", "trust_remote_code"), ""),
}
"""vLLM arguments that rlcore sets, with the setting that controls each; empty where only one value works."""
_SERVERS_OWN = ("tensor_parallel", "kv_cache_gb", "gpu_memory_utilization", "prefix_caching", "enforce_eager")
"""Settings that are fixed when a server starts; changing them in the client would have no effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMConfig:
    """Settings of an in-process engine, or of the connection to a running server."""

    tensor_parallel: int = 1
    """Ranks per engine; the ranks of the pool are divided into engines of this size."""
    max_batch_size: int = 256
    """Maximum number of sequences in flight per engine."""
    max_model_len: int = 0
    """Maximum length of prompt and response together, in tokens. 0: the limit in the model's config."""
    kv_cache_gb: float = 0.0
    """Size of the KV cache on each rank. 0: on a GPU, what `gpu_memory_utilization` leaves; on a CPU, enough for
    `max_batch_size` sequences but at most a quarter of the free memory."""
    gpu_memory_utilization: float = 0.9
    """Fraction of a GPU's memory for weights, activations and KV cache together."""
    prefix_caching: bool = True
    """Reuse the KV cache of repeated prompts; new weights empty the cache."""
    lora_rank: int = 0
    """Maximum rank of LoRA adapters. Above 0, the engine keeps the model in model.path and receives only adapters, as
    backend=fsdp sends them with backend.lora_sync=adapters."""
    enforce_eager: bool = False
    """Disable CUDA graphs. A CPU always runs eagerly."""
    pause: Literal["retract", "in_place"] = "retract"
    """Treatment of sequences in flight when new weights arrive. retract: recompute their KV cache under the new weights;
    in_place: continue with the KV cache of the old weights, which requests that arrive meanwhile may also reuse."""
    url: str = ""
    """Running servers, comma-separated, one for each rank of the pool: http://host:8000. Empty: an engine in the
    rollout's own process."""
    api_key_variable: str = ""
    """With `url`: name of the environment variable whose value is sent as bearer token."""
    weights: Literal["files", "broadcast"] = "files"
    """With `url`: weight-transfer method. files: through `weights_directory`; broadcast: over the network, in a process
    group with the server's ranks (gloo, or NCCL if this host has a GPU too)."""
    weights_directory: str = "/dev/shm"
    """With `url`: directory for weight files; the server must see it under the same path."""
    bucket_mb: int = 256
    """With `url`: size of the buckets in which weights are sent."""
    timeout_s: float = 600.0
    """With `url`: timeout of one request to the server."""
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    """Additional arguments of vLLM's `EngineArgs`, by their vLLM names. Example: {attention_backend: FLASHINFER}"""

    def __post_init__(self) -> None:
        require(self.tensor_parallel >= 1, "tensor_parallel", "1 or more", self.tensor_parallel, 1)
        require(self.max_batch_size >= 1, "max_batch_size", "1 or more", self.max_batch_size, 256)
        require(self.max_model_len >= 0, "max_model_len", "0 (the model's) or more", self.max_model_len, 0)
        require(self.kv_cache_gb >= 0, "kv_cache_gb", "0 (automatic) or more", self.kv_cache_gb, 0)
        share = self.gpu_memory_utilization
        require(0 < share < 1, "gpu_memory_utilization", "a number between 0 and 1", share, 0.9)
        require(0 <= self.lora_rank <= 512, "lora_rank", "0 (full models) to 512", self.lora_rank, 16)
        alone = self.lora_rank > 0 and bool(self.url)
        require(not alone, "lora_rank", "0 with rollout.url, as servers receive full models", self.lora_rank, 0)
        require(self.bucket_mb >= 1, "bucket_mb", "1 or more", self.bucket_mb, 256)
        require(self.timeout_s > 0, "timeout_s", "more than 0", self.timeout_s, 600)
        for name in (*_SERVERS_OWN, "engine_options") if self.url else ():
            given, default = getattr(self, name), getattr(VLLMConfig(), name)
            wanted = f"{default} with rollout.url, because it is set when the server starts"
            require(given == default, name, wanted, given, default)
        for name in self.engine_options.keys() & OURS.keys():
            advice = f"Type  {OURS[name]}=…" if OURS[name] else f"Leave engine_options.{name} out."
            raise ConfigError(f"engine_options: {name} is set by rlcore\n{advice}")
        for url in self.urls:
            known = url.startswith(("http://", "https://"))
            require(known, "url", "an address such as http://host:8000", repr(url), "http://localhost:8000")

    @property
    def urls(self) -> list[str]:
        """Server addresses without a trailing slash."""
        return [url.strip().rstrip("/") for url in self.url.split(",") if url.strip()]
