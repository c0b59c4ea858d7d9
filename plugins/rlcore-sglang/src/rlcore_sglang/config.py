"""Settings of `rollout=sglang`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from rlcore.errors import ConfigError, require
from rlcore.kits.engine.config import EngineConfig
from rlcore.protocols.backend import ModelConfig

NO_FLOAT32 = "SGLang's default attention kernels on a GPU (fa3, flashinfer, trtllm_mha) support only 16-bit precision"
_REPLICAS = ("dp_size", "data_parallel_size", "enable_dp_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class SGLangConfig(EngineConfig):
    """Settings of an engine in its own process, or of the connection to a running server.

    `engine_options` are arguments of SGLang's engine.
    """

    ENGINE: ClassVar = "SGLang"
    SERVE: ClassVar = "rlcore_sglang.serve"
    PORT: ClassVar = 30000
    SET_BY_RLCORE: ClassVar = {
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
    OF_BOTH: ClassVar = (*EngineConfig.OF_BOTH, "deterministic")
    OF_ENGINE: ClassVar = (*EngineConfig.OF_ENGINE, "python", "start_timeout_s")

    kv_cache_gb: float = 0.0
    """On a CPU: size of an engine's KV cache. 0: enough for `max_batch_size` sequences but at most a quarter of the free
    memory. On a GPU the KV cache takes what `gpu_memory_utilization` leaves."""
    gpu_memory_utilization: float = 0.85
    """Fraction of a GPU's memory for weights and KV cache together."""
    deterministic: bool = True
    """Make a response depend only on its seed. SGLang uses seeds only in its deterministic mode. False is faster on a GPU
    and allows sampling.min_p, but responses are not reproducible."""
    pause: Literal["retract", "in_place", "abort"] = "retract"
    """Treatment of sequences in flight when new weights arrive. retract: recompute their KV cache under the new weights;
    in_place: continue with the KV cache of the old weights, which requests that arrive meanwhile may also reuse; abort: end
    them and send their tokens so far again as part of the prompt. With in_place, the first token that `token_versions`
    attributes to the new weights may have been sampled by the old ones, because SGLang computes one token ahead, unless
    engine_options={disable_overlap_schedule: true}."""
    weights: Literal["memory", "disk"] = "memory"
    """Weight-transfer method. memory: through shared memory, in buckets; disk: as a model directory that SGLang loads,
    which works with any server."""
    router: str = ""
    """With `url`: address of a router for requests; weights and pauses still go to each server."""
    python: str = ""
    """Python interpreter of the engine's process, from a virtual environment with SGLang. Empty: the rollout's own."""
    start_timeout_s: float = 1500.0
    """Timeout of the engine's start. Keep it below runtime.start_timeout_s, which otherwise expires first, without the
    engine's log."""

    def __post_init__(self) -> None:
        EngineConfig.__post_init__(self)  # super() fails here, because slots=True replaces the class
        require(self.start_timeout_s > 0, "start_timeout_s", "more than 0", self.start_timeout_s, 1500)
        self.check_urls("router", [self.router] if self.router else [])
        if self.router and not self.url:
            raise ConfigError(
                "router: url is empty, but weights and pauses go to each server directly\n"
                "Type  rollout.url=http://host:30000"
            )
        for name in self.engine_options:
            if name in _REPLICAS:
                raise ConfigError(
                    f"engine_options: {name} creates replicas inside one engine, and SGLang cannot update their weights\n"
                    "Type  placement=split pools.rollout.devices_per_node=2   to run one engine on each rank of the pool"
                )


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
