"""Tables of the model families: names here and in Hugging Face files, and the configurations that are supported.

To add a family, create a `Family` and a backend that has it:

    class Mine(MegatronBackend):
        families = {**FAMILIES, "my_type": Family(rules=..., options=...)}

and run with `backend=my_file.py:Mine`. Models are compared with those of transformers in the tests, not at run time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rlcore.errors import ModelError

Join = Literal["one", "stacked", "grouped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A parameter of megatron-core, and the Hugging Face tensors that it is made of."""

    ours: str
    """Name in the layer; {expert} stands for the index of an expert on this rank."""
    theirs: tuple[str, ...]
    """Hugging Face names in the layer; {expert} stands for the index in the whole model."""
    cut: int | None = None
    """Dimension of the Hugging Face tensors that tensor parallelism splits; None: replicated."""
    join: Join = "one"
    """one: the same tensor. stacked: concatenated along dimension 0. grouped: for each group of heads, query heads, then
    key, then value."""

    together: str = ""
    """For a rule with {expert}: name in transformers of the tensor [experts, …] of all experts in a layer."""

    def expert(self, name: str) -> int | None:
        """Return the index of the expert in a name that this rule matches, 0 without experts; None if it does not match."""
        found = re.fullmatch(re.escape(self.ours).replace(r"\{expert\}", r"(\d+)"), name)
        return None if found is None else int((*found.groups(), 0)[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model family; sizes, norms and positions are read from the Hugging Face configuration."""

    rules: tuple[Rule, ...]
    """Rules for the parameters of a layer."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of megatron-core's TransformerConfig."""
    from_config: Mapping[str, str] = field(default_factory=dict)
    """TransformerConfig option -> field of the Hugging Face configuration."""
    must_be: Mapping[str, Any] = field(default_factory=dict)
    """Required values of fields in the Hugging Face configuration; other values are not supported."""


_ATTENTION = (
    Rule(ours="input_layernorm.weight", theirs=("input_layernorm.weight",)),
    Rule(ours="self_attention.linear_qkv.layer_norm_weight", theirs=("input_layernorm.weight",)),
    Rule(
        ours="self_attention.linear_qkv.weight",
        theirs=("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        cut=0,
        join="grouped",
    ),
    Rule(ours="self_attention.linear_proj.weight", theirs=("self_attn.o_proj.weight",), cut=1),
    Rule(ours="pre_mlp_layernorm.weight", theirs=("post_attention_layernorm.weight",)),
)
_MLP = (
    Rule(ours="mlp.linear_fc1.layer_norm_weight", theirs=("post_attention_layernorm.weight",)),
    Rule(ours="mlp.linear_fc1.weight", theirs=("mlp.gate_proj.weight", "mlp.up_proj.weight"), cut=0, join="stacked"),
    Rule(ours="mlp.linear_fc2.weight", theirs=("mlp.down_proj.weight",), cut=1),
)
_QKV_BIAS = (
    Rule(
        ours="self_attention.linear_qkv.bias",
        theirs=("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
        cut=0,
        join="grouped",
    ),
)
_QK_NORM = (
    Rule(ours="self_attention.q_layernorm.weight", theirs=("self_attn.q_norm.weight",)),
    Rule(ours="self_attention.k_layernorm.weight", theirs=("self_attn.k_norm.weight",)),
)
_GATE_UP = ("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight")
_DOWN = ("mlp.experts.{expert}.down_proj.weight",)
_EXPERTS = (
    Rule(ours="mlp.router.weight", theirs=("mlp.gate.weight",)),
    *(
        Rule(ours=ours, theirs=_GATE_UP, join="stacked", together="mlp.experts.gate_up_proj")
        for ours in ("mlp.experts.local_experts.{expert}.linear_fc1.weight", "mlp.experts.linear_fc1.weight{expert}")
    ),
    *(
        Rule(ours=ours, theirs=_DOWN, together="mlp.experts.down_proj")
        for ours in ("mlp.experts.local_experts.{expert}.linear_fc2.weight", "mlp.experts.linear_fc2.weight{expert}")
    ),
)

_WINDOWS = ("sliding_window", "attention_chunk_size")
_COMPUTED = "rotary_emb.inv_freq"
"""Buffers in old files, which are computed from the configuration instead."""
TOP = {
    "embedding.word_embeddings.weight": Rule(ours="", theirs=("model.embed_tokens.weight",), cut=0),
    "decoder.final_layernorm.weight": Rule(ours="", theirs=("model.norm.weight",)),
    "output_layer.weight": Rule(ours="", theirs=("lm_head.weight",), cut=0),
}
"""Rules for parameters outside the layers, the same for all families."""

FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        rules=_ATTENTION + _MLP, must_be={"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"}
    ),
    "qwen2": Family(
        rules=_ATTENTION + _QKV_BIAS + _MLP,
        options={"add_qkv_bias": True},
        must_be={"use_sliding_window": False, "hidden_act": "silu"},
    ),
    "qwen3": Family(
        rules=_ATTENTION + _QK_NORM + _MLP,
        options={"qk_layernorm": True},
        must_be={"attention_bias": False, "use_sliding_window": False, "hidden_act": "silu"},
    ),
    "qwen3_moe": Family(
        rules=_ATTENTION + _QK_NORM + _EXPERTS,
        options={
            "qk_layernorm": True,
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32",
            "moe_token_dispatcher_type": "alltoall",
            # softmax over the chosen experts equals the softmax over all experts, normalized to sum to 1
            "moe_router_pre_softmax": False,
        },
        from_config={
            "num_moe_experts": "num_experts",
            "moe_router_topk": "num_experts_per_tok",
            "moe_ffn_hidden_size": "moe_intermediate_size",
        },
        must_be={
            "attention_bias": False,
            "use_sliding_window": False,
            "hidden_act": "silu",
            "norm_topk_prob": True,
            "mlp_only_layers": [],
            "decoder_sparse_step": 1,
        },
    ),
}
"""model_type in config.json -> family."""


def unknown_tensors(family: Family, names: Iterable[str]) -> list[str]:
    """Return the Hugging Face tensors without a rule; a model that has any does not match the table."""
    inside = [re.escape(name).replace(r"\{expert\}", r"\d+") for rule in family.rules for name in rule.theirs]
    of_layers = rf"model\.layers\.\d+\.({'|'.join(inside)})"
    known = re.compile("|".join([of_layers, *(re.escape(name) for rule in TOP.values() for name in rule.theirs)]))
    return sorted(name for name in names if not known.fullmatch(name) and not name.endswith(_COMPUTED))


def beyond_last_layer(names: Iterable[str], num_layers: int) -> list[str]:
    """Return the Hugging Face tensors of layers that the model does not have."""
    layers = {name: re.match(r"model\.layers\.(\d+)\.", name) for name in names}
    return [name for name, layer in layers.items() if layer and int(layer[1]) >= num_layers]


def family_of(config: Any, families: Mapping[str, Family], path: str) -> Family:
    """Return the family of a Hugging Face configuration.

    Raises:
        ModelError: there is no table for it, or the table does not support its settings.
    """
    family = families.get(config.model_type)
    if family is None:
        raise ModelError(
            f"model.path={path} has model_type '{config.model_type}', but backend=megatron has tables only for"
            f" {', '.join(sorted(families))}\n"
            "Type  backend=fsdp, or add a table: README of rlcore-megatron, 'Adding a model family'"
        )
    for name, wanted in family.must_be.items():
        found = getattr(config, name, wanted)
        if found != wanted:
            raise ModelError(
                f"model.path={path} has {name}={found}, but backend=megatron supports {config.model_type} only with"
                f" {name}={wanted}\nType  backend=fsdp"
            )
    for name in _WINDOWS:
        if (
            hasattr(type(config), name) and getattr(config, name) is not None
        ):  # other classes may have the field and ignore it
            raise ModelError(
                f"model.path={path} has {name}={getattr(config, name)}, but backend=megatron has no attention windows\n"
                "Type  backend=fsdp"
            )
    return family
