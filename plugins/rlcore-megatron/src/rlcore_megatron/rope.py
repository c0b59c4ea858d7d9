"""Frequencies of the rotary embedding, and checks for variants that megatron-core does not support."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlcore.errors import ModelError
from rlcore.models.load import check_positions
from rlcore_megatron.layout import head_size


def frequencies(hf_config: Any, path: str) -> Tensor:
    """Return the frequencies [D / 2] of the rotary embedding, as transformers computes them for this configuration.

    Raises:
        ModelError: they depend on the longest sample of a batch, or use an option that megatron-core does not support.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    check_positions(hf_config, path)
    rope = hf_config.rope_parameters
    kind = rope.get("rope_type", "default")
    if kind == "default":
        size = int(head_size(hf_config) * rope.get("partial_rotary_factor", 1.0))
        if size != head_size(hf_config):
            raise _no_rope(path, f"partial_rotary_factor={rope['partial_rotary_factor']}")
        steps: Tensor = torch.arange(0, size, 2, dtype=torch.int64).float() / size
        return torch.reciprocal(rope["rope_theta"] ** steps)
    if kind not in ROPE_INIT_FUNCTIONS:
        raise _no_rope(path, f"rope_type={kind}")
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](hf_config, torch.device("cpu"))
    if factor != 1.0:
        raise _no_rope(path, f"rope_type={kind} with attention_factor={factor:.4g}")
    found: Tensor = frequencies
    return found


def _no_rope(path: str, what: str) -> ModelError:
    return ModelError(f"model.path={path} has {what}, which backend=megatron does not support\nType  backend=fsdp")
