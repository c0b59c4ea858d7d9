"""The settings under `rollout=sglang`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rlcore.errors import ConfigError, require
from rlcore.protocols.backend import ModelConfig

_OURS = {
    "tp_size": "rollout.tensor_parallel",
    "tensor_parallel_size": "rollout.tensor_parallel",
    "model_path": "model.path",
    "dtype": "model.precision",
    "device": "pools.rollout.device",
    "context_length": "rollout.max_model_len",
    "enable_deterministic_inference": "rollout.deterministic",
    "mem_fraction_static": "rollout.gpu_memory_utilization",
    "max_running_requests": "rollout.max_batch_size",
    "max_total_tokens": "rollout.kv_cache_gb",
    "disable_radix_cache": "rollout.prefix_caching",
    "disable_cuda_graph": "rollout.enforce_eager",
    **dict.fromkeys(("pp_size", "pipeline_parallel_size", "nnodes"), "rollout.tensor_parallel"),
    **dict.fromkeys(("skip_tokenizer_init", "custom_weight_loader", "weight_version", "trust_remote_code"), ""),
    **dict.fromkeys(("enable_memory_saver", "enable_weights_cpu_backup"), ""),
}
"""SGLang's arguments that are set here, and by which setting; empty where only one value works."""
_SERVERS_OWN = (
    "tensor_parallel",
    "kv_cache_gb",
    "gpu_memory_utilization",
    "prefix_caching",
    "enforce_eager",
    "python",
    "start_timeout_s",
    "engine_options",
)
"""Settings that a server has been started with; another value here would do nothing."""
NO_FLOAT32 = "the attention kernels that SGLang chooses on a GPU (fa3, flashinfer, trtllm_mha) compute in 16 bits only"
_REPLICAS = ("dp_size", "data_parallel_size", "enable_dp_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class SGLangConfig:
    """How the engine is made, or where it runs already."""

    tensor_parallel: int = 1
    """Ranks that share one engine; the ranks of the pool are divided into engines of this size."""
    max_batch_size: int = 256
    """Sequences in flight in one engine."""
    max_model_len: int = 0
    """Most tokens of prompt and response together; 0: what the model's config says."""
    kv_cache_gb: float = 0.0
    """On a CPU: memory of keys and values of one engine. 0: what `max_batch_size` sequences can need, at most a quarter
    of the free memory. On a GPU it is what `gpu_memory_utilization` leaves."""
    gpu_memory_utilization: float = 0.85
    """Share of a GPU that weights, keys and values may take together."""
    prefix_caching: bool = True
    """Keep keys and values of prompts that come again; new weights empty the cache."""
    deterministic: bool = True
    """A seed fixes a response. SGLang draws with seeds in its deterministic mode only; false is faster on a GPU, gives
    other responses each time, and allows sampling.min_p."""
    enforce_eager: bool = False
    """No CUDA graphs. The CPU runs eagerly in any case."""
    pause: Literal["retract", "in_place", "abort"] = "retract"
    """What becomes of sequences in flight when new weights come. retract: read again under the new weights; in_place: go
    on with keys and values of the old ones, which a request that comes meanwhile may find in the cache too; abort: ended,
    and their beginnings sent again as prompts. In place, the first
    token that `token_versions` gives to the new weights may be the last of the old ones, as SGLang computes one ahead; with
    engine_options={disable_overlap_schedule: true} it does not."""
    weights: Literal["memory", "disk"] = "memory"
    """memory: through shared memory in buckets; disk: as a model directory that SGLang loads, which any server can."""
    weights_directory: str = "/dev/shm"
    """Where weights are left for the engine; a server must see the same path."""
    bucket_mb: int = 256
    """Weights are handed over in pieces of this size."""
    url: str = ""
    """Servers that run already, comma-separated, one for each rank of the pool: http://host:30000. Empty: an engine in a
    process of its own."""
    api_key_variable: str = ""
    """With `url`: name of an environment variable whose value is sent as bearer token."""
    router: str = ""
    """With `url`: where requests go; weights and pauses still go to each server."""
    python: str = ""
    """Interpreter of the engine's process, for an environment in which SGLang is installed; empty: the rollout's own."""
    start_timeout_s: float = 1500.0
    """For the engine to load the model; less than runtime.start_timeout_s, or that ends first, without the engine's log."""
    timeout_s: float = 600.0
    """For any one answer of the engine: the next finished sample, a piece of the weights."""
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of SGLang's engine, under its names. Example: {attention_backend: fa3}"""

    def __post_init__(self) -> None:
        require(self.tensor_parallel >= 1, "tensor_parallel", "1 or more", self.tensor_parallel, 1)
        require(self.max_batch_size >= 1, "max_batch_size", "1 or more", self.max_batch_size, 256)
        require(self.max_model_len >= 0, "max_model_len", "0 (the model's) or more", self.max_model_len, 0)
        require(self.kv_cache_gb >= 0, "kv_cache_gb", "0 (automatic) or more", self.kv_cache_gb, 0)
        share = self.gpu_memory_utilization
        require(0 < share < 1, "gpu_memory_utilization", "a number between 0 and 1", share, 0.85)
        require(self.bucket_mb >= 1, "bucket_mb", "1 or more", self.bucket_mb, 256)
        require(self.start_timeout_s > 0, "start_timeout_s", "more than 0", self.start_timeout_s, 1500)
        require(self.timeout_s > 0, "timeout_s", "more than 0", self.timeout_s, 600)
        for name in _SERVERS_OWN if self.url else ():
            given, default = getattr(self, name), getattr(SGLangConfig(), name)
            require(given == default, name, f"{default!r} with rollout.url, as a server has its own", given, default)
        for setting, urls in (("url", self.urls), ("router", [self.router] if self.router else [])):
            for url in urls:
                known = url.startswith(("http://", "https://"))
                require(known, setting, "an address such as http://host:30000", repr(url), "http://localhost:30000")
        if self.router and not self.url:
            raise ConfigError(
                "router: weights and pauses go to each server, and url names none\nType  rollout.url=http://host:30000"
            )
        _check_options(self.engine_options)

    @property
    def urls(self) -> list[str]:
        """The servers, without a slash at the end."""
        return [url.strip().rstrip("/") for url in self.url.split(",") if url.strip()]


def check_precision(config: SGLangConfig, model: ModelConfig, device: str) -> None:
    """Refuse float32 on a GPU unless an attention backend is chosen.

    Raises:
        ConfigError: the engine would not start.
    """
    backends = [name for name in config.engine_options if name.endswith("attention_backend")]
    if device != "cpu" and model.precision == "float32" and not backends:
        raise ConfigError(
            f"model.precision=float32: {NO_FLOAT32}\n"
            "Type  model.precision=bfloat16   or, slower,  rollout.engine_options.attention_backend=triton"
        )


def _check_options(options: Mapping[str, Any]) -> None:
    for name in options:
        if name in _REPLICAS:
            raise ConfigError(
                f"engine_options: {name} makes replicas inside one engine, and SGLang refuses new weights for these\n"
                "Type  pools.rollout.devices_per_node=2   with  placement=split: every rank of the pool is an engine"
            )
        if name in _OURS:
            advice = f"Type  {_OURS[name]}=…" if _OURS[name] else f"Leave engine_options.{name} out."
            raise ConfigError(f"engine_options: {name} is set by rlcore\n{advice}")
