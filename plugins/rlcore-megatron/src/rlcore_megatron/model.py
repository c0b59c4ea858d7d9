"""A megatron-core GPTModel for a Hugging Face configuration: this rank's stages, over packed samples.

Samples are concatenated ("thd"). Transformer Engine's layers get their borders; megatron-core's own layers use rlcore's
attention in buckets. Shapes: T tokens, t of this rank, H heads, D head size.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from rlcore.models.attention import Packing, packed_attention
from rlcore.protocols.backend import BackendContext, ModelConfig
from rlcore_megatron.config import MegatronConfig
from rlcore_megatron.context_parallel import shared_attention
from rlcore_megatron.families import Family
from rlcore_megatron.fit import check_divides
from rlcore_megatron.grid import Grid
from rlcore_megatron.layout import Entry, Plan, check_once, head_size
from rlcore_megatron.rope import frequencies

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Samples(PackedSeqParams):  # type: ignore[misc]
    """Borders of the samples in a micro-batch, as megatron-core passes them to attention."""

    packing: Packing
    """The same borders, for megatron-core's own layers."""
    positions: Tensor
    """Positions [t] of this rank's tokens in their samples."""
    whole: Samples | None = None
    """Borders of all samples, for attention with context parallelism; the rest of a layer treats a part as one sample."""

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> Samples:
        borders = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
        longest = 1 << (max(lengths) - 1).bit_length()  # rounded up: megatron-core caches one rotary table per value
        packing = Packing(lengths, device)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=borders,
            cu_seqlens_kv=borders,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            packing=packing,
            positions=packing.position_ids[0],
        )

    def part(self, context: dist.ProcessGroup) -> Samples:
        """Return the borders for the layers of this rank, which holds a part of the tokens."""
        if context.size() == 1:
            return self
        own = self.positions.chunk(context.size())[context.rank()]
        borders = torch.tensor([0, len(own)], device=own.device, dtype=torch.int32)
        cut: dict[str, Any] = {"cu_seqlens_q": borders, "cu_seqlens_kv": borders}
        return replace(self, **cut, positions=own, whole=self)


class PackedAttention(nn.Module):
    """Core attention for megatron-core's own layers: rlcore's attention over packed samples."""

    def __init__(
        self, config: TransformerConfig, *args: Any, softmax_scale: float | None = None, **options: Any
    ) -> None:
        super().__init__()
        self._scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: Samples,
        **options: Any,
    ) -> Tensor:
        """Compute [T, H·D] from query [T, H, D], key and value [T, H_kv, D]."""
        q, k, v = (part.transpose(0, 1)[None] for part in (query, key, value))
        out, _ = packed_attention(self, q, k, v, None, packing=packed_seq_params.packing, scaling=self._scale)
        return out[0].flatten(1)


class RMSNorm(nn.Module):
    """RMSNorm with sequence parallelism, which megatron-core's lacks: marks its weight, so that gradients are summed."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **options: Any) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._eps = eps

    def forward(self, states: Tensor) -> Tensor:
        return nn.functional.rms_norm(states, (states.shape[-1],), self.weight, self._eps)


class ValueHead(nn.Module):
    """Last layer of a critic, always in float32."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, hidden_size, device=torch.cuda.current_device()))

    def forward(self, hidden: Tensor, *args: Any, **options: Any) -> tuple[Tensor, None]:
        """Return the hidden states; values are computed with the loss."""
        return hidden, None


@dataclass(frozen=True, slots=True)
class Model:
    """This rank's part of a model."""

    chunks: list[Any]
    """GPTModels, one per virtual stage."""
    entries: dict[nn.Parameter, Entry]
    config: TransformerConfig
    is_critic: bool
    vocabulary: int

    @property
    def last(self) -> Any:
        return self.chunks[-1]

    def hidden(self, output: Tensor) -> Tensor:
        """Return hidden states [t, hidden] from the output of the last stage, the same on all tensor-parallel devices."""
        states = output[0]
        if not self.config.sequence_parallel:
            return states
        gathered: Tensor = gather_from_sequence_parallel_region(states, tensor_parallel_output_grad=False)
        return gathered

    def head_weight(self) -> Tensor:
        """Return this device's part of the output embedding, or the value head."""
        last = self.last
        shared = last.share_embeddings_and_output_weights
        weight: Tensor = last.shared_embedding_or_output_weight() if shared else last.output_layer.weight
        return weight


def build(
    hf_config: Any, family: Family, config: MegatronConfig, model: ModelConfig, grid: Grid, context: BackendContext
) -> Model:
    """Build this rank's part of the model, without loading weights. Collective.

    Raises:
        UserError: the grid does not divide heads, layers or experts, or positions depend on other samples.
    """
    check_divides(hf_config, config)
    is_critic = context.head == "value"
    tied = bool(hf_config.tie_word_embeddings) and not is_critic  # a critic has no output embedding to tie
    transformer = _transformer_config(hf_config, family, config, model, trained=context.trained)
    spec = _spec(transformer, config, model.precision, grid.context)
    padded = -(-hf_config.vocab_size // config.tensor_parallel) * config.tensor_parallel
    if padded != hf_config.vocab_size and context.rank == 0:
        _log.warning(
            "vocabulary of %d padded to %d for tensor_parallel=%d; padding has zero probability and is never saved",
            hf_config.vocab_size,
            padded,
            config.tensor_parallel,
        )
    stages = range(config.virtual_stages) if config.virtual_stages > 1 else [None]
    rotations = frequencies(hf_config, model.path)
    chunks = [
        _chunk(transformer, spec, hf_config, padded, tied, stage, rotations, is_critic, grid, context)
        for stage in stages
    ]
    plan = Plan(family=family, config=hf_config, devices=config.tensor_parallel, tied=tied, is_critic=is_critic)
    per_rank = (transformer.num_moe_experts or 0) // config.expert_parallel
    entries = {
        parameter: plan.entry(
            name,
            parameter,
            first_layer=get_transformer_layer_offset(transformer, chunk.vp_stage),
            first_expert=grid.expert.rank() * per_rank,
        )
        for chunk in chunks
        for name, parameter in chunk.named_parameters()
    }
    for parameter, entry in entries.items():
        if entry.devices > 1 or entry.is_expert:
            # megatron-core sets this when it initializes weights, which is skipped here. Without it, the gradient norm
            # counts the parameter on one tensor-parallel device only
            parameter.tensor_model_parallel = True
    check_once(entries.values(), hf_config.model_type)
    return Model(chunks, entries, transformer, is_critic, hf_config.vocab_size)


def _transformer_config(
    hf_config: Any, family: Family, config: MegatronConfig, model: ModelConfig, *, trained: bool
) -> TransformerConfig:
    dtype = torch.bfloat16 if model.precision == "bfloat16" else torch.float32
    experts = {ours: getattr(hf_config, theirs) for ours, theirs in family.from_config.items()}
    recompute: dict[str, Any] = {}
    if model.gradient_checkpointing and trained:
        recompute["recompute_granularity"] = config.recompute
        if config.recompute == "full":
            recompute |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    engine = config.uses_transformer_engine(model.precision)
    if engine and experts:
        experts["moe_grouped_gemm"] = True
    overlapped = config.virtual_stages > 1
    return TransformerConfig(
        num_layers=hf_config.num_hidden_layers,
        hidden_size=hf_config.hidden_size,
        ffn_hidden_size=hf_config.intermediate_size,
        num_attention_heads=hf_config.num_attention_heads,
        num_query_groups=hf_config.num_key_value_heads,
        kv_channels=head_size(hf_config),
        normalization="RMSNorm",
        layernorm_epsilon=hf_config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=config.tensor_parallel,
        pipeline_model_parallel_size=config.pipeline_parallel,
        num_layers_in_first_pipeline_stage=config.first_stage_layers or None,
        num_layers_in_last_pipeline_stage=config.last_stage_layers or None,
        virtual_pipeline_model_parallel_size=config.virtual_stages if config.virtual_stages > 1 else None,
        expert_model_parallel_size=config.expert_parallel,
        expert_tensor_parallel_size=1,
        sequence_parallel=config.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp8=config.fp8 or None,
        perform_initialization=False,  # weights are loaded
        variable_seq_lengths=True,
        calculate_per_token_loss=True,  # losses are sums, not divided by micro-batches or ranks
        # with two stages, the next and the previous stage are the same rank; this keeps their messages apart
        overlap_p2p_comm=overlapped,
        batch_p2p_comm=not overlapped,
        deallocate_pipeline_outputs=True,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=engine,
        **recompute,
        **{"moe_token_dispatcher_type": "alltoall", **family.options, **experts},
    )


def _spec(transformer: TransformerConfig, config: MegatronConfig, precision: str, context: dist.ProcessGroup) -> Any:
    normed = transformer.qk_layernorm
    experts = transformer.num_moe_experts
    engine = config.uses_transformer_engine(precision)
    if engine:
        spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=experts, moe_grouped_gemm=experts is not None, qk_layernorm=normed
        )
    else:
        spec = get_gpt_layer_local_spec(num_experts=experts, qk_layernorm=normed, normalization="RMSNorm")
    attention = spec.submodules.self_attention.submodules
    core = attention.core_attention if engine else PackedAttention
    attention.core_attention = core if context.size() == 1 else partial(shared_attention, core, context)
    if engine:
        return spec
    if normed:
        attention = replace(attention, q_layernorm=RMSNorm, k_layernorm=RMSNorm)
    layer = replace(
        spec.submodules,
        input_layernorm=RMSNorm,
        pre_mlp_layernorm=RMSNorm,
        self_attention=replace(spec.submodules.self_attention, submodules=attention),
    )
    specs = [replace(spec, submodules=layer)] * get_num_layers_to_build(transformer)
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)


def _chunk(
    transformer: TransformerConfig,
    spec: Any,
    hf_config: Any,
    vocabulary: int,
    tied: bool,
    stage: int | None,
    rotations: Tensor,
    is_critic: bool,
    grid: Grid,
    context: BackendContext,
) -> Any:
    groups = ProcessGroupCollection.use_mpu_process_groups()
    groups.cp = (
        parallel_state.get_expert_tensor_parallel_group()
    )  # a group of one rank: turns off its own context parallelism
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=stage is None, vp_stage=stage)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=stage is None, vp_stage=stage)
    chunk = GPTModel(
        transformer,
        spec,
        vocab_size=vocabulary,
        max_sequence_length=hf_config.max_position_embeddings,
        pre_process=first,
        post_process=last,
        parallel_output=True,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=tied,
        pg_collection=groups,
        vp_stage=stage,
    )
    chunk.rotary_pos_emb.inv_freq = rotations.to(torch.cuda.current_device())
    if grid.context.size() > 1:
        chunk.rotary_pos_emb.get_rotary_seq_len = lambda *given: given[-1]  # pass the samples on to _own_rotations
        chunk.rotary_pos_emb.forward = MethodType(_own_rotations, chunk.rotary_pos_emb)
    if last and is_critic:
        chunk.output_layer = ValueHead(hf_config.hidden_size)
    elif last:
        chunk.output_layer.forward = MethodType(_hidden_states, chunk.output_layer)
    chunk.to(torch.cuda.current_device())
    if not context.trained:
        chunk.requires_grad_(False)
    chunk.train(context.trained)
    return chunk


def _own_rotations(rotary: RotaryEmbedding, samples: Samples, **options: Any) -> Tensor:
    """Return rotations [t, 1, 1, D] of this rank's tokens, whose part may begin anywhere in a sample."""
    table: Tensor = RotaryEmbedding.forward(rotary, samples.max_seqlen_q, packed_seq=True)
    return table[samples.positions]


def _hidden_states(layer: Any, hidden: Tensor, *args: Any, **options: Any) -> tuple[Tensor, None]:
    """Replace the output layer's forward; logits are computed with the loss, only for the tokens under it."""
    return hidden, None
