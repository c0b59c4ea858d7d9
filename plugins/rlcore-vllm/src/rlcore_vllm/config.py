"""The settings under `rollout=vllm`."""

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
"""vLLM's arguments that are set here, and by which setting; empty where only one value works."""
_SERVERS_OWN = ("tensor_parallel", "kv_cache_gb", "gpu_memory_utilization", "prefix_caching", "enforce_eager")
"""Settings that a server has been started with; another value here would do nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMConfig:
    """How the engine is made, or where it runs already."""

    tensor_parallel: int = 1
    """Ranks that share one engine; the ranks of the pool are divided into engines of this size."""
    max_batch_size: int = 256
    """Sequences in flight in one engine."""
    max_model_len: int = 0
    """Most tokens of prompt and response together; 0: what the model's config says."""
    kv_cache_gb: float = 0.0
    """Memory of keys and values on each rank. 0: on a GPU what `gpu_memory_utilization` leaves, on a CPU what
    `max_batch_size` sequences can need, at most a quarter of the free memory."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU that weights, activations, keys and values may take together."""
    prefix_caching: bool = True
    """Keep keys and values of prompts that come again; new weights empty the cache."""
    lora_rank: int = 0
    """Above 0, the engine keeps the model of model.path and gets adapters of at most this rank, as backend=fsdp sends them
    with backend.lora_sync=adapters."""
    enforce_eager: bool = False
    """No CUDA graphs. The CPU runs eagerly in any case."""
    pause: Literal["retract", "in_place"] = "retract"
    """What becomes of sequences in flight when new weights come. retract: read again under the new weights; in_place: go on
    with keys and values of the old ones, which a request that comes meanwhile may find in the cache too."""
    url: str = ""
    """Servers that run already, comma-separated, one for each rank of the pool: http://host:8000. Empty: an engine in the
    rollout's own process."""
    api_key_variable: str = ""
    """With `url`: name of an environment variable whose value is sent as bearer token."""
    weights: Literal["files", "broadcast"] = "files"
    """With `url`: how weights get there. files: through `weights_directory`; broadcast: over the network, in a process group
    with the server's ranks (gloo, or NCCL where this host has a GPU too)."""
    weights_directory: str = "/dev/shm"
    """With `url`: where weights are left for the server, which must see the same path."""
    bucket_mb: int = 256
    """With `url`: weights are handed over in pieces of this size."""
    timeout_s: float = 600.0
    """With `url`: for any one request to the server."""
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of vLLM's `EngineArgs`, under its names. Example: {attention_backend: FLASHINFER}"""

    def __post_init__(self) -> None:
        require(self.tensor_parallel >= 1, "tensor_parallel", "1 or more", self.tensor_parallel, 1)
        require(self.max_batch_size >= 1, "max_batch_size", "1 or more", self.max_batch_size, 256)
        require(self.max_model_len >= 0, "max_model_len", "0 (the model's) or more", self.max_model_len, 0)
        require(self.kv_cache_gb >= 0, "kv_cache_gb", "0 (automatic) or more", self.kv_cache_gb, 0)
        share = self.gpu_memory_utilization
        require(0 < share < 1, "gpu_memory_utilization", "a number between 0 and 1", share, 0.9)
        require(0 <= self.lora_rank <= 512, "lora_rank", "0 (whole models) to 512", self.lora_rank, 16)
        alone = self.lora_rank > 0 and bool(self.url)
        require(not alone, "lora_rank", "0 with rollout.url, as servers get whole models", self.lora_rank, 0)
        require(self.bucket_mb >= 1, "bucket_mb", "1 or more", self.bucket_mb, 256)
        require(self.timeout_s > 0, "timeout_s", "more than 0", self.timeout_s, 600)
        for name in (*_SERVERS_OWN, "engine_options") if self.url else ():
            given, default = getattr(self, name), getattr(VLLMConfig(), name)
            require(given == default, name, f"{default} with rollout.url, as a server has its own", given, default)
        for name in self.engine_options.keys() & OURS.keys():
            advice = f"Type  {OURS[name]}=…" if OURS[name] else f"Leave engine_options.{name} out."
            raise ConfigError(f"engine_options: {name} is set by rlcore\n{advice}")
        for url in self.urls:
            known = url.startswith(("http://", "https://"))
            require(known, "url", "an address such as http://host:8000", repr(url), "http://localhost:8000")

    @property
    def urls(self) -> list[str]:
        """The servers, without a slash at the end."""
        return [url.strip().rstrip("/") for url in self.url.split(",") if url.strip()]
