"""Settings that rollouts on other engines share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar

from rlcore.errors import ConfigError, require, require_at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of an engine that the rollout starts, or of the connection to running servers.

    A plugin's Config adds its own settings. If it has a `__post_init__`, that calls `EngineConfig.__post_init__(self)`.
    """

    ENGINE: ClassVar[str]
    """Name of the engine, for errors: "vLLM"."""
    SERVE: ClassVar[str]
    """Module of the command that starts a server: "rlcore_vllm.serve"."""
    PORT: ClassVar[int] = 8000
    """Default port of a server."""
    SET_BY_RLCORE: ClassVar[Mapping[str, str]] = {}
    """Arguments of the engine that `engine_options` must not contain, each with the setting that controls it, or "" if
    only one value works."""
    OF_SERVER: ClassVar[tuple[str, ...]] = (
        "tensor_parallel",
        "kv_cache_gb",
        "gpu_memory_utilization",
        "prefix_caching",
        "enforce_eager",
    )
    """Settings that are fixed when a server starts. A client must not change them, as that would have no effect."""
    OF_BOTH: ClassVar[tuple[str, ...]] = ("max_batch_size", "max_model_len")
    """Settings of a server that a client may also have."""
    OF_ENGINE: ClassVar[tuple[str, ...]] = ("engine_options",)
    """Settings of an engine that the rollout starts, which a server does not have under this name."""

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
    enforce_eager: bool = False
    """Disable CUDA graphs. A CPU always runs eagerly."""
    url: str = ""
    """Running servers, comma-separated, one for each rank of the pool: http://host:8000. Empty: an engine that the rollout
    starts."""
    api_key_variable: str = ""
    """With `url`: name of the environment variable whose value is sent as bearer token."""
    weights_directory: str = "/dev/shm"
    """Directory for weight files; a server must see it under the same path."""
    bucket_mb: int = 256
    """Size of the buckets in which weights are sent."""
    timeout_s: float = 600.0
    """Timeout of one response from a server, or from an engine in another process."""
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    """Additional arguments of the engine, by the names that the engine gives them. Example: {attention_backend: fa3}"""

    def __post_init__(self) -> None:
        default = _defaults(self)
        require_at_least(self, tensor_parallel=1, max_batch_size=1, bucket_mb=1)
        require(self.max_model_len >= 0, "max_model_len", "0 (the model's) or more", self.max_model_len, 0)
        require(self.kv_cache_gb >= 0, "kv_cache_gb", "0 (automatic) or more", self.kv_cache_gb, 0)
        share, usual = self.gpu_memory_utilization, default["gpu_memory_utilization"]
        require(0 < share < 1, "gpu_memory_utilization", "a number between 0 and 1", share, usual)
        require(self.timeout_s > 0, "timeout_s", "more than 0", self.timeout_s, 600)
        for name in (*self.OF_SERVER, *self.OF_ENGINE) if self.url else ():
            given = getattr(self, name)
            wanted = f"{default[name]!r} with rollout.url, because it is set when the server starts"
            require(given == default[name], name, wanted, given, default[name])
        self.check_urls("url", self.urls)
        for name in self.engine_options:
            if (setting := self.SET_BY_RLCORE.get(name)) is not None:
                advice = f"Type  {setting}=…" if setting else f"Leave engine_options.{name} out."
                raise ConfigError(f"engine_options: {name} is set by rlcore\n{advice}")

    @property
    def urls(self) -> list[str]:
        """Server addresses without a trailing slash."""
        return [url.strip().rstrip("/") for url in self.url.split(",") if url.strip()]

    def check_urls(self, setting: str, urls: Iterable[str]) -> None:
        """Raise ConfigError for an address without a scheme."""
        for url in urls:
            known = url.startswith(("http://", "https://"))
            expected = f"an address such as http://host:{self.PORT}"
            require(known, setting, expected, repr(url), f"http://localhost:{self.PORT}")


def _defaults(config: EngineConfig) -> dict[str, Any]:
    return {it.name: it.default if it.default_factory is MISSING else it.default_factory() for it in fields(config)}
