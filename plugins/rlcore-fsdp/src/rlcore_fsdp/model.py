"""A Hugging Face causal model, built on the meta device and sharded over the grid; each rank loads its own part.

`PackedModel` is the root module for FSDP: everything that reads parameters runs inside its `forward`, which takes the
function to compute as an argument. Shapes: T tokens of a micro-batch, t of this rank, n tokens under the loss, D hidden
size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from rlcore.errors import ModelError
from rlcore.kits.backend.grid import check_divides
from rlcore.kits.backend.head import token_statistics
from rlcore.kits.backend.ulysses import join, own_places
from rlcore.kits.backend.value_head import VALUE_HEAD, initial_value_head
from rlcore.models.attention import ADVICE, check_kind
from rlcore.models.comparison import check_attention
from rlcore.models.head import LogitRule
from rlcore.models.load import check_directory, check_positions, check_same_files, read_config
from rlcore.models.weights import check_finite
from rlcore.protocols.backend import BackendContext, ModelConfig
from rlcore_fsdp import attention, lora, tensor_parallel
from rlcore_fsdp.attention import Layout
from rlcore_fsdp.config import FSDPConfig
from rlcore_fsdp.load import Conversion, load_shards, local_part, own_part, persistent_buffers
from rlcore_fsdp.mesh import Grid

_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}
"""Tolerance for the logits of packed samples, relative to the largest logit of the unpacked model."""


class PackedModel(nn.Module):
    """A causal model over packed samples, with a value head if it is a critic."""

    def __init__(self, model: Any, *, has_value_head: bool) -> None:
        super().__init__()
        config = model.config.get_text_config()
        self.model = model
        self.value_head = nn.Linear(config.hidden_size, 1, bias=False) if has_value_head else None
        self.rule = LogitRule.of(config)
        self.partial: set[str] = set()
        """Names of the parameters whose gradients must be summed over the tensor axis."""
        self.tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        self.is_trained = False
        """True if a trained backend owns this model; a frozen backend may share it with the adapters off."""

    def forward(self, compute: Callable[..., Any], *args: Any) -> Any:
        """Run `compute(*args)` with the parameters gathered by FSDP."""
        return compute(*args)

    def outputs(
        self, input_ids: Tensor, layout: Layout, before: Tensor, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Return [k, n] log-probs and entropy, or values, of the tokens under the loss, and a zero with a gradient.

        Args:
            input_ids: [T] of the whole micro-batch, including padding.
            before: [n] the position before each token under the loss, in ascending order.
            targets: [n] the tokens under the loss.

        Every rank computes the head for at least one token, and the gradient of the zero reaches every parameter,
        because all ranks of a mesh must run the same number of all-gathers and reductions.
        """
        hidden = self.hidden(layout.share(input_ids), layout)
        mine, places = own_places(before, layout.context, layout.num_tokens)
        if len(mine):
            outputs = found = self.head(hidden.index_select(0, places), targets[mine], temperature)
        else:
            found = self.head(hidden[:1], layout.share(input_ids)[:1], temperature)
            outputs = found.new_zeros(len(found), 0)
        return join(outputs, mine, len(targets), layout.context), found.sum() * 0.0

    def hidden(self, input_ids: Tensor, layout: Layout) -> Tensor:
        """Return the hidden states [t, D] after the last norm."""
        out = self.model.base_model(
            input_ids=input_ids[None],
            position_ids=layout.position_ids,
            attention_mask=None,
            use_cache=False,
            packing=layout,
        )
        states: Tensor = out.last_hidden_state[0]
        return states

    def head(self, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
        """Return [2, n] log-probs and entropy, or [1, n] values, in float32."""
        if self.value_head is not None:
            values: Tensor = self.value_head(hidden.float())
            return values.t().clone()  # FSDP warns about views
        embedding = self.model.get_output_embeddings()
        return torch.stack(embedding.token_statistics(hidden, targets, temperature, self.rule))

    def settle(self) -> None:
        """Reshard all modules; after a forward pass some parameters are still gathered."""
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def stored(self) -> dict[str, Tensor]:
        """Return name -> parameter or buffer, for everything that the model files contain."""
        return {**dict(self.model.named_parameters()), **persistent_buffers(self.model)}

    def trained_parameters(self, *, adapters: bool) -> dict[nn.Parameter, str]:
        """Return parameter -> name; a critic does not train an untied output embedding, which it never uses."""
        unused = None if self.value_head is None or self.tied else self.model.get_output_embeddings().weight
        named = {
            parameter: name
            for name, parameter in self.model.named_parameters()
            if parameter is not unused and (lora.is_adapter(name) or not adapters)
        }
        return named | ({self.value_head.weight: VALUE_HEAD} if self.value_head is not None else {})


def build(model: ModelConfig, config: FSDPConfig, grid: Grid, context: BackendContext) -> PackedModel:
    """Build, shard and load the model of one rank. Collective.

    Raises:
        ModelError: the model cannot be loaded, sharded, or run over packed samples.
    """
    directory, device = check_directory(model.path), torch.device(context.device)
    check_same_files(directory, device)
    attention.register(compiled=config.compile)
    packed = PackedModel(_on_meta(directory), has_value_head=context.head == "value").eval()
    conversion = Conversion(packed.model)
    check_fits(packed.model.config, config, model.path)
    layers = find_layers(packed.model, config.layers)
    if config.lora_rank:
        lora.add_adapters(packed.model, config)
    if grid.tensor is not None:
        packed.partial = tensor_parallel.cut(packed.model, grid.tensor)
    _shard(packed, layers, model, config, grid)
    _materialize(packed, torch.device("cpu") if config.cpu_offload else device)
    named = {lora.plain_name(name): tensor for name, tensor in packed.stored().items()}
    stored = {n: p for n, p in named.items() if not lora.is_adapter(n)}
    load_shards(stored, directory, conversion)
    check_finite(((n, local_part(p)) for n, p in stored.items()), directory, together=True)
    adapters = {n: p for n, p in named.items() if lora.is_adapter(n)}
    if config.lora_path:
        lora.read_adapters(adapters, config)
    else:
        lora.start_adapters(adapters, context.seed)
    for module in packed.modules():  # with cpu_offload, FSDP moves parameters to the device but not buffers
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
    if packed.value_head is not None:
        _start_value_head(packed.value_head, directory, context.seed)
    _check_packing(packed, model.precision, device)
    packed.settle()
    return packed


def check_fits(hf_config: Any, config: FSDPConfig, path: str) -> None:
    """Check that a model with this configuration can be packed, and sharded as configured.

    Raises:
        UserError: the model does not fit the settings.
    """
    check_positions(hf_config, path)
    check_kind(hf_config)
    heads = tensor_parallel.heads_of(hf_config.get_text_config())
    check_divides("context_parallel", config.context_parallel, heads)
    if config.tensor_parallel > 1:
        tensor_parallel.plan_of(hf_config)
        tensor_parallel.check_sizes(hf_config.get_text_config(), config.tensor_parallel)


def check_parts(directory: Path, config: FSDPConfig) -> None:
    """Check that the model has the modules that the settings name.

    Raises:
        UserError: a module does not exist.
    """
    if config.layers or config.lora_rank:
        model = _on_meta(directory)
        find_layers(model, config.layers)
        if config.lora_rank:
            lora.add_adapters(model, config)
        if config.lora_path:
            lora.check_start((name for name, _ in model.named_parameters() if lora.is_adapter(name)), config)


def find_layers(model: Any, path: str) -> list[nn.Module]:
    """Return the decoder layers.

    Raises:
        ModelError: the list of layers was not found; the message names the setting to use.
    """
    if path:
        try:
            found: Any = model.get_submodule(path)
        except AttributeError:
            found = None
        if isinstance(found, nn.ModuleList) and len(found):
            return list(found)
        raise _no_layers(model, f"backend.layers={path} is not a list of layers of {type(model).__name__}")
    kinds = set(model._no_split_modules or ())
    lists: list[nn.ModuleList] = [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) and all(type(layer).__name__ in kinds for layer in module)
    ]
    if not lists:
        raise _no_layers(model, f"the layers of {type(model).__name__} cannot be found")
    return list(sorted(lists, key=lambda found: len(found))[-1])


def _no_layers(model: Any, what: str) -> ModelError:
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module) > 1]
    return ModelError(
        f"{what}; it has these lists: {', '.join(lists) or 'none'}\nType  backend.layers={(lists or ['PATH'])[0]}"
    )


def _on_meta(directory: Path) -> Any:
    import transformers

    logging.getLogger("transformers").setLevel(logging.ERROR)
    config = read_config(directory)
    try:
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
            )
    except (ValueError, OSError, KeyError) as error:
        reason, _, _ = str(error).partition("\n")
        raise ModelError(
            f"model.path={directory} cannot be loaded as a causal language model: {reason}\n"
            "Copy the whole directory again, or upgrade transformers, which may not support this model yet:"
            "  pip install --upgrade transformers"
        ) from error


def _shard(packed: PackedModel, layers: list[nn.Module], model: ModelConfig, config: FSDPConfig, grid: Grid) -> None:
    options: dict[str, Any] = {"mesh": grid.fsdp}
    if model.precision == "bfloat16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if config.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=grid.fsdp.device_type == "cuda")
    for layer in layers:
        if config.compile:
            layer.compile(dynamic=True)
        fully_shard(layer, reshard_after_forward=config.reshard_after_forward, **options)
    head = packed.model.get_output_embeddings()
    head.token_statistics = MethodType(_token_statistics, head)
    if not packed.tied:
        fully_shard(packed.model.get_input_embeddings(), reshard_after_forward=config.reshard_after_forward, **options)
        fully_shard(head, reshard_after_forward=False, **options)
        register_fsdp_forward_method(head, "token_statistics")
    if packed.value_head is not None:  # always float32
        exact = {name: option for name, option in options.items() if name != "mp_policy"}
        fully_shard(packed.value_head, reshard_after_forward=False, **exact)
    fully_shard(packed, reshard_after_forward=False, **options)
    assert isinstance(packed, FSDPModule)


def _token_statistics(
    head: Any, hidden: Tensor, targets: Tensor, temperature: float, rule: LogitRule
) -> tuple[Tensor, Tensor]:
    bias = getattr(head, "bias", None)
    return token_statistics(hidden, head.weight, targets, temperature=temperature, bias=bias, rule=rule)


@torch.no_grad()
def _materialize(packed: PackedModel, device: torch.device) -> None:
    """Allocate the shards, and recompute the buffers that are not stored in files (rotary frequencies)."""
    packed.to_empty(device=device)
    packed.model.tie_weights()
    for parameter in packed.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # skip random weights, they are loaded next
    for module in packed.model.modules():
        if module._non_persistent_buffers_set:
            packed.model._init_weights(module)


@torch.no_grad()
def _start_value_head(head: nn.Linear, directory: Path, seed: int) -> None:
    weight: Any = head.weight
    weight.to_local().copy_(initial_value_head(weight.shape[1], directory, seed)[own_part(weight)])


def _check_packing(packed: PackedModel, precision: str, device: torch.device) -> None:
    """Compare packed samples with the unpacked model, then leave packed attention on.

    Raises:
        ModelError: packed samples affect each other, or the class changes attention or logits in an unsupported way.
    """
    model = packed.model

    def logits(samples: Sequence[Tensor]) -> Tensor:
        hidden = packed.hidden(torch.cat(list(samples)), Layout([len(sample) for sample in samples], device))
        return packed.rule(model.get_output_embeddings()(hidden))

    def refuse(reason: str) -> ModelError:
        name = type(model).__name__.removeprefix("FSDP")
        return ModelError(f"backend=fsdp cannot train {name}: {reason}\n{ADVICE}")

    check_attention(model, attention.NAME, logits, tolerance=_TOLERANCE[precision], refuse=refuse, run=packed)
