"""Memory of an engine."""

from __future__ import annotations

from pathlib import Path

from rlcore.errors import ConfigError
from rlcore.kits.engine.config import EngineConfig
from rlcore.models.size import ModelSize, human
from rlcore.protocols.backend import ModelConfig

_FREE_SHARE = 0.25


def bytes_per_token(model: ModelConfig) -> int:
    """Return the KV cache of one token in all layers."""
    size = ModelSize.read(Path(model.path))
    return size.num_layers * size.num_kv_values * (2 if model.precision == "bfloat16" else 4)


def cache_bytes(config: EngineConfig, *, free: int, context_length: int, spare_tokens: int, token_bytes: int) -> int:
    """Return the size of the KV cache on a CPU: `kv_cache_gb`, or enough for `max_batch_size` sequences.

    Args:
        free: available memory in bytes.
        spare_tokens: room that the engine needs in addition to each sequence.
        token_bytes: cache of one token, as `bytes_per_token` returns it, on one rank if `kv_cache_gb` is for one.

    Raises:
        ConfigError: not even one sequence fits, or the memory is not free.
    """
    one = (context_length + spare_tokens) * token_bytes
    asked = int(config.kv_cache_gb * 2**30)
    granted = asked or min(config.max_batch_size * one, int(free * _FREE_SHARE))
    if one <= granted <= free:
        return granted
    where = f"rollout.kv_cache_gb={config.kv_cache_gb:g}" if asked else f"a quarter of the free {human(free)}"
    needed = f"{context_length} tokens × {token_bytes} bytes = {human(one)}"
    reason = f"one sequence needs {needed}" if granted < one else f"{human(free)} are free"
    raise ConfigError(
        f"the rollout's KV cache does not fit: {reason}, and {where} is {human(granted)}\n"
        f"Type  rollout.max_model_len={max(1, granted // token_bytes - spare_tokens)}   or enlarge it:"
        f"  rollout.kv_cache_gb={one / 2**30:.2g}"
    )


def taken_bytes(config: EngineConfig, weights: int, cache: int, *, device: int, num_sharing: int = 1) -> int:
    """Return the memory that an engine takes on one device; a server uses other devices.

    Args:
        weights: bytes of the model on one device.
        cache: estimate of the KV cache in bytes, used on a CPU.
        device: memory of the GPU in bytes, of which an engine always takes its configured share; 0 on a CPU.
        num_sharing: ranks that share the cache of `kv_cache_gb`.
    """
    if config.url:
        return 0
    if config.kv_cache_gb:
        return weights + int(config.kv_cache_gb * 2**30) // num_sharing
    return int(device * config.gpu_memory_utilization) if device else weights + cache


def start_advice(cause: str, config: EngineConfig) -> str:
    """Return what to type after an engine has failed to start with this error."""
    if not any(word in cause.lower() for word in ("memory", "max_model_len")):
        return "Use another engine for this model:  rollout=hf"
    share = config.gpu_memory_utilization
    return f"Type  rollout.gpu_memory_utilization=…  (now {share:g}), or shorten:  rollout.max_model_len=4096"
