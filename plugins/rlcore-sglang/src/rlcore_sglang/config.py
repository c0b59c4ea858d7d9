"""Settings of `rollout=sglang`."""

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
"""SGLang arguments that rlcore sets, with the setting that controls each; empty where only one value works."""
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
"""Settings that are fixed when a server starts; changing them in the client would have no effect."""
NO_FLOAT32 = "SGLang's default attention kernels on a GPU (fa3, flashinfer, trtllm_mha) support only 16-bit precision"
_REPLICAS = ("dp_size", "data_parallel_size", "enable_dp_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class SGLangConfig:
    """Settings of an engine in its own process, or of the connection to a running server."""

    tensor_parallel: int = 1
    """Ranks per engine; the ranks of the pool are divided into engines of this size."""
    max_batch_size: int = 256
    """Maximum number of sequences in flight per engine."""
    max_model_len: int = 0
    """Maximum length of prompt and response together, in tokens. 0: the limit in the model's config."""
    kv_cache_gb: float = 0.0
    """On a CPU: size of an engine's KV cache. 0: enough for `max_batch_size` sequences but at most a quarter of the free
    memory. On a GPU the KV cache takes what `gpu_memory_utilization` leaves."""
    gpu_memory_utilization: float = 0.85
    """Fraction of a GPU's memory for weights and KV cache together."""
    prefix_caching: bool = True
    """Reuse the KV cache of repeated prompts; new weights empty the cache."""
    deterministic: bool = True
    """Make a response depend only on its seed. SGLang uses seeds only in its deterministic mode. False is faster on a GPU
    and allows sampling.min_p, but responses are not reproducible."""
    enforce_eager: bool = False
    """Disable CUDA graphs. A CPU always runs eagerly."""
    pause: Literal["retract", "in_place", "abort"] = "retract"
    """Treatment of sequences in flight when new weights arrive. retract: recompute their KV cache under the new weights;
    in_place: continue with the KV cache of the old weights, which requests that arrive meanwhile may also reuse; abort: end
    them and send their tokens so far again as part of the prompt. With in_place, the first token that `token_versions`
    attributes to the new weights may have been sampled by the old ones, because SGLang computes one token ahead, unless
    engine_options={disable_overlap_schedule: true}."""
    weights: Literal["memory", "disk"] = "memory"
    """Weight-transfer method. memory: through shared memory, in buckets; disk: as a model directory that SGLang loads,
    which works with any server."""
    weights_directory: str = "/dev/shm"
    """Directory for weight files; a server must see it under the same path."""
    bucket_mb: int = 256
    """Size of the buckets in which weights are sent."""
    url: str = ""
    """Running servers, comma-separated, one for each rank of the pool: http://host:30000. Empty: an engine in its own
    process."""
    api_key_variable: str = ""
    """With `url`: name of the environment variable whose value is sent as bearer token."""
    router: str = ""
    """With `url`: address of a router for requests; weights and pauses still go to each server."""
    python: str = ""
    """Python interpreter of the engine's process, from a virtual environment with SGLang. Empty: the rollout's own."""
    start_timeout_s: float = 1500.0
    """Timeout of the engine's start. Keep it below runtime.start_timeout_s, which otherwise expires first, without the
    engine's log."""
    timeout_s: float = 600.0
    """Timeout of one answer from the engine: the next finished sample, or a bucket of weights."""
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    """Additional arguments of SGLang's engine, by their SGLang names. Example: {attention_backend: fa3}"""

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
            wanted = f"{default!r} with rollout.url, because it is set when the server starts"
            require(given == default, name, wanted, given, default)
        for setting, urls in (("url", self.urls), ("router", [self.router] if self.router else [])):
            for url in urls:
                known = url.startswith(("http://", "https://"))
                require(known, setting, "an address such as http://host:30000", repr(url), "http://localhost:30000")
        if self.router and not self.url:
            raise ConfigError(
                "router: url is empty, but weights and pauses go to each server directly\n"
                "Type  rollout.url=http://host:30000"
            )
        _check_options(self.engine_options)

    @property
    def urls(self) -> list[str]:
        """Server addresses without a trailing slash."""
        return [url.strip().rstrip("/") for url in self.url.split(",") if url.strip()]


def check_precision(config: SGLangConfig, model: ModelConfig, device: str) -> None:
    """Refuse float32 on a GPU unless an attention backend is set.

    Raises:
        ConfigError: the engine would not start with this precision.
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
                f"engine_options: {name} creates replicas inside one engine, and SGLang cannot update their weights\n"
                "Type  placement=split pools.rollout.devices_per_node=2   to run one engine on each rank of the pool"
            )
        if name in _OURS:
            advice = f"Type  {_OURS[name]}=…" if _OURS[name] else f"Leave engine_options.{name} out."
            raise ConfigError(f"engine_options: {name} is set by rlcore\n{advice}")
