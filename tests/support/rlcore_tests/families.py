"""Tiny random models of many families, for testing a backend or an engine beyond their attention windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

WINDOW = 8
"""Window or chunk, in tokens."""
_SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,  # the default of 0.02 makes attention and logits almost uniform
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_EXPERTS |= dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4)
_DEEPSEEK = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
_DEEPSEEK |= {"head_dim": 4, "num_key_value_heads": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
_SLIDING = {"sliding_window": WINDOW}
_ALTERNATING = {**_SLIDING, "layer_types": ["sliding_attention", "full_attention"]}
_QWEN = {**_SLIDING, "use_sliding_window": True, "max_window_layers": 1}

WINDOWED: Mapping[str, Mapping[str, Any]] = {
    "mistral": _SLIDING,
    "qwen2": _QWEN,
    "gemma2": _ALTERNATING,
    "gemma3_text": _ALTERNATING,
    "phi3": _SLIDING,
    "olmo3": _ALTERNATING,
    "cohere2": _ALTERNATING,
    "starcoder2": _SLIDING,
    "mixtral": {**_EXPERTS, **_SLIDING},
    "qwen2_moe": {**_EXPERTS, **_QWEN, "shared_expert_intermediate_size": 16},
    "phimoe": {**_EXPERTS, **_SLIDING},
}
"""model_type -> settings; the last two have their window in the attention mask only."""
PLAIN: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gpt_neox": {},
    "olmo2": {},
    "qwen3_moe": _EXPERTS,
    "deepseek_v3": {**_EXPERTS, **_DEEPSEEK},
}
"""model_type -> settings of families without a window."""
CHUNKED: Mapping[str, Mapping[str, Any]] = {
    "llama4_text": {**_EXPERTS, "intermediate_size_mlp": 48, "attention_chunk_size": WINDOW}
}
"""model_type -> settings of a family with chunked attention."""


def make_family(model_type: str, **changes: Any) -> Any:
    """Return a random model in transformers' own implementation, float32, in evaluation mode."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    settings = {**_SIZES, **{**WINDOWED, **PLAIN, **CHUNKED}[model_type], **changes}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = CONFIG_MAPPING[model_type](**settings)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model.float().eval()
