"""Size of the KV cache on a CPU."""

from __future__ import annotations

import os
from pathlib import Path

from rlcore.errors import ConfigError
from rlcore.kits.engine.checks import Limits
from rlcore.protocols.backend import ModelConfig
from rlcore.trainer.memory import ModelSize, human
from rlcore_sglang.config import SGLangConfig

_FREE_SHARE = 0.25


def cache_tokens(config: SGLangConfig, model: ModelConfig, limits: Limits) -> int:
    """Return the size of an engine's KV cache in tokens.

    Raises:
        ConfigError: not even one sequence fits.
    """
    size = ModelSize.read(Path(model.path))
    per_token = size.num_layers * size.num_kv_values * (2 if model.precision == "bfloat16" else 4)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    one = (limits.context_length + 1) * per_token
    asked = int(config.kv_cache_gb * 2**30)
    granted = asked or min(config.max_batch_size * one, int(free * _FREE_SHARE))
    if granted < one or granted > free:
        where = f"rollout.kv_cache_gb={config.kv_cache_gb:g}" if asked else f"a quarter of the free {human(free)}"
        needed = f"{limits.context_length} tokens × {per_token} bytes = {human(one)}"
        reason = f"one sequence needs {needed}" if granted < one else f"{human(free)} are free"
        raise ConfigError(
            f"the rollout's KV cache does not fit: {reason}, and {where} is {human(granted)}\n"
            f"Type  rollout.max_model_len={max(1, granted // per_token - 1)}   or enlarge it:"
            f"  rollout.kv_cache_gb={one / 2**30:.2g}"
        )
    return granted // per_token
