"""A Hugging Face causal model, built on the meta device, cut over the grid, and filled by each rank with its own part.

`PackedModel` is what FSDP sees as the root: everything that reads parameters runs inside its `forward`, which takes what is
to be computed as an argument. Shapes: T tokens of a micro-batch, t of this rank, n tokens under the loss, D hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from rlcore.errors import ModelError
from rlcore.models.attention import ADVICE, check_kind
from rlcore.models.comparison import check_attention
from rlcore.models.load import check_directory, check_positions, check_same_files, read_config
from rlcore.models.weights import check_finite
from rlcore.protocols.backend import BackendContext, ModelConfig
from rlcore_fsdp import attention, context_parallel, lora, tensor_parallel
from rlcore_fsdp.attention import Layout
from rlcore_fsdp.checkpoint import HEAD_FILE, VALUE_HEAD
from rlcore_fsdp.config import FSDPConfig
from rlcore_fsdp.head import LogitRule, token_statistics
from rlcore_fsdp.load import Conversion, load_shards, local_part, own_part, persistent_buffers
from rlcore_fsdp.mesh import Grid

_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}
"""Of logits, relative to the largest: packed samples against the model's own way."""


class PackedModel(nn.Module):
    """A causal model over packed samples, with a value head if it is a critic."""

    def __init__(self, model: Any, *, has_value_head: bool) -> None:
        super().__init__()
        config = model.config.get_text_config()
        self.model = model
        self.value_head = nn.Linear(config.hidden_size, 1, bias=False) if has_value_head else None
        self.rule = LogitRule.of(config)
        self.partial: set[str] = set()
        """Names of parameters whose gradients are to be summed over the tensor axis."""
        self.tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        self.is_trained = False
        """A trained backend owns it; a frozen one may look at it with the adapters off."""

    def forward(self, compute: Callable[..., Any], *args: Any) -> Any:
        """Run `compute(*args)` with the parameters gathered as FSDP gathers them."""
        return compute(*args)

    def outputs(
        self, input_ids: Tensor, layout: Layout, before: Tensor, targets: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """[k, n] of the n tokens under the loss: log-probs and entropy, or values; and a zero with a gradient.

        Args:
            input_ids: [T] of the whole micro-batch, padding included.
            before: [n] the place before each token under the loss, in ascending order.
            targets: [n] the tokens themselves.

        Every rank computes the head for one token at least, and the zero reaches every parameter: the ranks of a
        mesh must gather and reduce equally often, whatever their samples are.
        """
        hidden = self.hidden(layout.share(input_ids), layout)
        mine = ((before >= layout.start) & (before < layout.start + layout.num_tokens)).nonzero().squeeze(1)
        places = before[mine] - layout.start
        if not len(mine):
            found = self.head(hidden[:1], layout.share(input_ids)[:1], temperature)
            outputs = found.new_zeros(len(found), len(targets))
        else:
            found = self.head(hidden.index_select(0, places), targets[mine], temperature)
            whole = found.new_zeros(len(found), len(targets))
            outputs = found if len(mine) == len(targets) else whole.index_copy(1, mine, found)
        return context_parallel.sum_parts(outputs, layout.context), found.sum() * 0.0

    def hidden(self, input_ids: Tensor, layout: Layout) -> Tensor:
        """[t, D] after the last norm."""
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
        """[2, n] log-probs and entropy, or [1, n] values, float32."""
        if self.value_head is not None:
            values: Tensor = self.value_head(hidden.float())
            return values.t().clone()  # FSDP warns of views
        embedding = self.model.get_output_embeddings()
        return torch.stack(embedding.token_statistics(hidden, targets, temperature, self.rule))

    def settle(self) -> None:
        """Let the registered parameters be the shards again; a forward pass leaves gathered ones where it ended."""
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def stored(self) -> dict[str, Tensor]:
        """Name -> parameter or buffer of the model that its files hold."""
        return {**dict(self.model.named_parameters()), **persistent_buffers(self.model)}

    def trained_parameters(self, *, adapters: bool) -> dict[nn.Parameter, str]:
        """Parameter -> name. A critic predicts no token: it leaves out an output embedding that is nothing else."""
        unused = None if self.value_head is None or self.tied else self.model.get_output_embeddings().weight
        named = {
            parameter: name
            for name, parameter in self.model.named_parameters()
            if parameter is not unused and (lora.is_adapter(name) or not adapters)
        }
        return named | ({self.value_head.weight: VALUE_HEAD} if self.value_head is not None else {})


def build(model: ModelConfig, config: FSDPConfig, grid: Grid, context: BackendContext) -> PackedModel:
    """The model of one rank, sharded and loaded; every rank calls it.

    Raises:
        ModelError: it cannot be loaded, cut, or computed over packed samples.
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
    _materialise(packed, torch.device("cpu") if config.cpu_offload else device)
    named = {lora.plain_name(name): tensor for name, tensor in packed.stored().items()}
    stored = {n: p for n, p in named.items() if not lora.is_adapter(n)}
    load_shards(stored, directory, conversion)
    check_finite(((n, local_part(p)) for n, p in stored.items()), directory, together=True)
    lora.start_adapters({n: p for n, p in named.items() if lora.is_adapter(n)}, context.seed)
    for module in packed.modules():  # with cpu_offload, FSDP brings parameters to the device and nothing else
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
    if packed.value_head is not None:
        _start_value_head(packed.value_head, directory, context.seed)
    _check_packing(packed, model.precision, device)
    packed.settle()
    return packed


def check_fits(hf_config: Any, config: FSDPConfig, path: str) -> None:
    """Raises: UserError: a model with this configuration cannot be packed, or cut as the settings say."""
    check_positions(hf_config, path)
    check_kind(hf_config)
    context_parallel.check_heads(hf_config.get_text_config(), config.context_parallel)
    if config.tensor_parallel > 1:
        tensor_parallel.plan_of(hf_config)
        tensor_parallel.check_sizes(hf_config.get_text_config(), config.tensor_parallel)


def check_parts(directory: Path, config: FSDPConfig) -> None:
    """Raises: UserError: the model lacks a part that a setting names."""
    if config.layers or config.lora_rank:
        model = _on_meta(directory)
        find_layers(model, config.layers)
        if config.lora_rank:
            lora.add_adapters(model, config)


def find_layers(model: Any, path: str) -> list[nn.Module]:
    """The decoder layers.

    Raises:
        ModelError: there is no list of them; says what to set.
    """
    if path:
        try:
            found: Any = model.get_submodule(path)
        except AttributeError:
            found = None
        if isinstance(found, nn.ModuleList) and len(found):
            return list(found)
        raise _no_layers(model, f"backend.layers={path} is no list of layers of {type(model).__name__}")
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
            "Copy the whole directory again, or let transformers know newer models:  pip install --upgrade transformers"
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
    if packed.value_head is not None:  # float32 whatever the model computes with
        exact = {name: option for name, option in options.items() if name != "mp_policy"}
        fully_shard(packed.value_head, reshard_after_forward=False, **exact)
    fully_shard(packed, reshard_after_forward=False, **options)
    assert isinstance(packed, FSDPModule)


def _token_statistics(
    head: Any, hidden: Tensor, targets: Tensor, temperature: float, rule: LogitRule
) -> tuple[Tensor, Tensor]:
    return token_statistics(
        hidden, head.weight, getattr(head, "bias", None), targets, temperature=temperature, rule=rule
    )


@torch.no_grad()
def _materialise(packed: PackedModel, device: torch.device) -> None:
    """Memory for the shards. Buffers that are in no file (rotary frequencies) are computed again."""
    packed.to_empty(device=device)
    packed.model.tie_weights()
    for parameter in packed.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers draws no weights that are then read
    for module in packed.model.modules():
        if module._non_persistent_buffers_set:
            packed.model._init_weights(module)


@torch.no_grad()
def _start_value_head(head: nn.Linear, directory: Path, seed: int) -> None:
    """The one that was trained with the model, where there is one; else a random one, the same on any number of ranks."""
    weight: Any = head.weight
    whole = torch.empty(weight.shape)
    whole.normal_(std=1.0 / (weight.shape[1] + 1), generator=torch.Generator().manual_seed(seed))
    if (trained := directory / HEAD_FILE).is_file():
        whole = load_file(trained)[VALUE_HEAD]
    weight.to_local().copy_(whole[own_part(weight)])


def _check_packing(packed: PackedModel, precision: str, device: torch.device) -> None:
    """Compare packed samples with what the model computes by itself, then leave packed attention on.

    Raises:
        ModelError: samples affect each other, or the class does something to attention or logits that is unknown here.
    """
    model = packed.model

    def logits(samples: Sequence[Tensor]) -> Tensor:
        hidden = packed.hidden(torch.cat(list(samples)), Layout([len(sample) for sample in samples], device))
        return packed.rule(model.get_output_embeddings()(hidden))

    def refuse(reason: str) -> ModelError:
        name = type(model).__name__.removeprefix("FSDP")
        return ModelError(f"backend=fsdp cannot train {name}: {reason}\n{ADVICE}")

    check_attention(model, attention.NAME, logits, tolerance=_TOLERANCE[precision], refuse=refuse, run=packed)
