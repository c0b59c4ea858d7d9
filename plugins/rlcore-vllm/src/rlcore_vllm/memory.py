"""Size of the KV cache on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlcore.errors import ConfigError
from rlcore.protocols.backend import ModelConfig
from rlcore.trainer.memory import ModelSize, human
from rlcore_vllm.config import VLLMConfig

_FREE_SHARE = 0.25
_BLOCK_TOKENS = 128
"""Granularity of the cache; vLLM reserves one additional block for itself."""


def cache_bytes(config: VLLMConfig, model: ModelConfig) -> int:
    """Return the size of one rank's KV cache in bytes.

    Raises:
        ConfigError: not even one sequence fits.
    """
    import psutil  # a dependency of vLLM, which planning a run does not need

    context = config.max_model_len or context_length(model.path)
    per_token = _bytes_per_token(config, model)
    one = (context + 2 * _BLOCK_TOKENS) * per_token
    free = psutil.virtual_memory().available
    asked = int(config.kv_cache_gb * 2**30)
    granted = asked or min(config.max_batch_size * one, int(free * _FREE_SHARE))
    if granted < one or granted > free:
        where = f"rollout.kv_cache_gb={config.kv_cache_gb:g}" if asked else f"a quarter of the free {human(free)}"
        needed = f"{context} tokens × {per_token} bytes = {human(one)}"
        fitting = max(1, granted // per_token - 2 * _BLOCK_TOKENS)
        reason = f"one sequence needs {needed}" if granted < one else f"{human(free)} are free"
        raise ConfigError(
            f"the rollout's KV cache does not fit: {reason}, and {where} is {human(granted)}\n"
            f"Type  rollout.max_model_len={fitting}   or enlarge it:  rollout.kv_cache_gb={one / 2**30:.2g}"
        )
    return granted


def _bytes_per_token(config: VLLMConfig, model: ModelConfig) -> int:
    size = ModelSize.read(Path(model.path))
    width = 2 if model.precision == "bfloat16" else 4
    return max(1, size.num_layers * size.num_kv_values * width // config.tensor_parallel)


def context_length(path: str) -> int:
    """Return the context length in the model's config, in tokens."""
    return int(text_config(path).get("max_position_embeddings", 2048))


def text_config(path: str) -> dict[str, Any]:
    """Load config.json of a model directory, with the text part of a multimodal config merged into it."""
    config: dict[str, Any] = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    inner: dict[str, Any] = config.get("text_config", {})
    return config | inner
