"""One rank's part of a model: micro-batches through megatron-core's schedules, optimizer steps, loading and saving.

The backend imports this module, and with it megatron-core, only after it has checked that megatron-core is installed.
Shapes: T tokens of a micro-batch, t of them on this rank, n tokens under the loss, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from rlcore.errors import ModelError
from rlcore.kits.backend.checkpoint import ShardSaving
from rlcore.kits.backend.head import Part, token_statistics
from rlcore.kits.backend.ulysses import join, own_places
from rlcore.kits.backend.update import blend
from rlcore.kits.backend.value_head import VALUE_HEAD, initial_value_head
from rlcore.models.load import check_directory, check_same_files, read_config
from rlcore.models.weights import check_finite, check_names, weight_files
from rlcore.protocols.backend import BackendContext, ModelConfig, OptimizerConfig
from rlcore_megatron import checkpoint
from rlcore_megatron.config import MegatronConfig
from rlcore_megatron.families import Family, beyond_last_layer, family_of, unknown_tensors
from rlcore_megatron.files import TensorFiles
from rlcore_megatron.grid import make_grid
from rlcore_megatron.layout import Slice
from rlcore_megatron.memory import HostCopy
from rlcore_megatron.model import Samples, build
from rlcore_megatron.optimizer import MOMENTS, Optimizer
from rlcore_megatron.weights import WeightStream

_SIZES = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")

MicroBatch = tuple[Tensor, list[int]]
"""input_ids [T] and the lengths of the samples, all above 0."""


class Engine:
    """This rank's part of one model. Every method except `offload` and `reload` is collective."""

    def __init__(
        self,
        config: MegatronConfig,
        families: Mapping[str, Family],
        *,
        model: ModelConfig,
        optimizer: OptimizerConfig,
        context: BackendContext,
    ) -> None:
        self._source = check_directory(model.path)
        hf_config = read_config(self._source)
        family = family_of(hf_config, families, model.path)
        if context.device != "cpu":
            torch.cuda.set_device(context.device)
        self.grid = make_grid(config, context)
        check_same_files(self._source, torch.device(context.device))
        self._model = build(hf_config, family, config, model, self.grid, context)
        self._device = torch.device(context.device)
        self._sizes = {name: getattr(hf_config, name) for name in _SIZES} | {"head": context.head}
        self._rank = context.rank
        self._read_weights(family, context.seed)
        self._optimizer = Optimizer(self._model, config, optimizer, self.grid) if context.trained else None
        self._chunks = self._model.chunks if self._optimizer is None else self._optimizer.chunks
        self._stream = WeightStream(self._model, self.grid, config.weights_bucket_mb)
        self._group = dist.new_group(backend="gloo")
        self._away: HostCopy | None = None
        self._exact: dict[nn.Parameter, Tensor] = {}
        """Float32 parameters in host memory of a frozen bfloat16 model that got other weights."""
        self._has_gradients = False
        self._token_multiple = config.token_multiple

    def run(
        self, micro_batches: Sequence[MicroBatch], compute: Callable[[int, Tensor], Tensor], *, backward: bool
    ) -> None:
        """Run micro-batches through the pipeline, and accumulate the gradients of the scalars that `compute` returns.

        Args:
            micro_batches: the same number on all ranks.
            compute: called on the last stage with the index of a micro-batch and this rank's hidden states [t, D],
                including padding; returns a scalar.
        """
        self._check_here("run")
        self._has_gradients |= backward

        def forward_step(numbered: Iterator[tuple[int, MicroBatch]], chunk: nn.Module) -> tuple[Tensor, object]:
            i, (ids, lengths) = next(numbered)
            padding = -len(ids) % self._token_multiple
            samples = Samples.of(lengths + [padding] * (padding > 0), self._device).part(self.grid.context)
            own = nn.functional.pad(ids, (0, padding)).chunk(self.grid.context.size())[self.grid.context.rank()]
            out = chunk(own[None], samples.positions[None], None, packed_seq_params=samples)

            def loss(output: Tensor) -> tuple[Tensor, Tensor, dict[str, object]]:
                scalar = compute(i, self._model.hidden(output))
                return scalar, torch.ones((), dtype=torch.int, device=self._device), {}

            return out, loss

        iterators = [enumerate(micro_batches) for _ in self._chunks]
        for chunk in self._chunks:
            chunk.train(backward)
        with torch.set_grad_enabled(backward):
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=self._chunks if len(self._chunks) > 1 else self._chunks[0],
                num_microbatches=len(micro_batches),
                seq_length=max(len(ids) for ids, _ in micro_batches),
                micro_batch_size=1,
                forward_only=not backward,
            )

    def head(self, hidden: Tensor, before: Tensor, targets: Tensor, temperature: float) -> Tensor:
        """Return [2, n] log-probs and entropy, or [1, n] values, float32, the same on all ranks of a context group.

        Only for the last stage. Each rank computes a part of the outputs, and the parts are summed. All ranks compute the
        same loss from the sum, so the backward pass does not sum gradients over ranks.

        Args:
            hidden: [t, D] of this rank's tokens.
            before: [n] the position before each target in the micro-batch.
        """
        context = self.grid.context if self.grid.context.size() > 1 else None
        mine, places = own_places(before, context, len(hidden))
        states, weight = hidden.index_select(0, places), self._model.head_weight()
        if self._model.is_critic:
            found = nn.functional.linear(states.float(), weight).t()
        else:
            part = Part(self.grid.tensor, self._model.vocabulary)
            found = torch.stack(token_statistics(states, weight, targets[mine], temperature=temperature, part=part))
        return join(found, mine, len(before), context)

    def step(self, lr: float) -> float | None:
        """Run an optimizer step and return the gradient norm, or None if it is not finite and the step was skipped."""
        assert self._optimizer is not None, "step on a frozen model"
        self._check_here("step")
        self._has_gradients = False
        return self._optimizer.step(lr)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Return an iterator over full parameters under their Hugging Face names, the same on every rank."""
        return self._stream.walk(self._away)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the names of `weights` -> their shapes."""
        return self._stream.shapes()

    @torch.no_grad()
    def load_weights(self, weights: Iterator[tuple[str, Tensor]], mix: float) -> None:
        """Set the parameters from full tensors with the names of `shapes`, on the device or in host memory."""
        for parameter, new in self._stream.own_parts(weights):
            if mix < 1:
                mixed = self._float32(parameter)
                blend(mixed, new, mix)
                new = mixed
            if self._optimizer is not None:
                self._optimizer.set_parameter(parameter, new)
                continue
            self._set_frozen(parameter, new)

    def _set_frozen(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Set a parameter of a frozen model, and keep the bits of `value` that the parameter cannot hold."""
        self._here(parameter).data.copy_(value)
        if torch.promote_types(value.dtype, parameter.dtype) == parameter.dtype:
            self._exact.pop(parameter, None)
        else:
            self._exact[parameter] = value.to("cpu", torch.float32, copy=True)

    def _float32(self, parameter: nn.Parameter) -> Tensor:
        """Return a float32 copy of a parameter on the device. Collective."""
        if self._optimizer is not None:
            own = self._optimizer.state(parameter, has_stepped=False)["param"]
            return own.to(torch.float32, copy=True).view_as(parameter)
        found = self._exact.get(parameter, self._here(parameter))
        return found.to(self._device, torch.float32, copy=True)

    def _here(self, tensor: Tensor) -> Tensor:
        return tensor if self._away is None else self._away.of(tensor)

    def save(self, directory: Path, num_steps: int) -> ShardSaving:
        """Copy the tensors that no lower rank saves to host memory, and begin to write them."""
        self._check_here("save")
        tensors: dict[str, Tensor] = {}
        slices: dict[str, Slice] = {}
        for parameter, entry in self._model.entries.items():
            if entry.is_copy:
                continue
            if self._optimizer is not None:
                state = self._optimizer.state(parameter, has_stepped=num_steps > 0)
            else:
                state = {"param": self._exact.get(parameter, parameter)}
            replicas = self.grid.expert_data if entry.is_expert else self.grid.data
            first = self.grid.tensor.rank() == 0 or entry.devices > 1 or entry.is_expert
            if replicas.rank() or not first:
                continue
            for kind, whole in state.items():
                for where, part in zip(entry.slices(self.grid.tensor.rank()), entry.split(whole)):
                    if where.start < where.stop:
                        own = part.narrow(where.axis, 0, where.stop - where.start)
                        tensors[f"{kind}.{where.name}"] = own.detach().to("cpu", torch.float32, copy=True)
                        slices[f"{kind}.{where.name}"] = where
        path = str(self._source.absolute())
        about = checkpoint.MegatronState(num_steps=num_steps, model=self._sizes, model_path=path)
        return checkpoint.save(directory, self._source, about, tensors, slices, self._group)

    def load(self, directory: Path) -> int:
        """Load a checkpoint of any grid and return its number of steps; check everything before changing anything."""
        self._check_here("load")
        state = checkpoint.read(directory)
        checkpoint.check_same_model(directory, state, self._sizes)
        kinds = ("param", *MOMENTS) if self._optimizer is not None and state.num_steps else ("param",)
        device = self.grid.tensor.rank()
        with checkpoint.open_shards(directory, state) as files:
            for kind in kinds:
                files.check((where for e in self._model.entries.values() for where in e.slices(device)), f"{kind}.")
            for parameter, entry in self._model.entries.items():
                found = {
                    kind: entry.weave([files.read(where, f"{kind}.") for where in entry.slices(device)])
                    for kind in kinds
                }
                if self._optimizer is not None:
                    self._optimizer.restore(parameter, found, state.num_steps)
                else:
                    self._set_frozen(parameter, found["param"])
        dist.barrier(group=self._group)
        return state.num_steps

    def offload(self) -> None:
        """Move parameters, gradients and optimizer state to host memory."""
        if self._away is None:
            tensors = [tensor for chunk in self._model.chunks for tensor in (*chunk.parameters(), *chunk.buffers())]
            gradients = []
            if self._optimizer is not None:
                tensors += self._optimizer.tensors()
                gradients = list(self._optimizer.gradients())
            zeros = [] if self._has_gradients else gradients
            self._away = HostCopy([*tensors, *gradients], self._device, zeros=zeros)
            if self._optimizer is not None:
                self._optimizer.away = self._away
            RotaryEmbedding.forward.cache_clear()

    def reload(self) -> None:
        """Move everything back to the device."""
        if self._away is not None:
            self._away.restore()
            self._away = None
            if self._optimizer is not None:
                self._optimizer.away = None

    def _check_here(self, what: str) -> None:
        if self._away is not None:
            raise RuntimeError(f"cannot {what} a model that is in host memory\nCall  reload()  first.")

    @torch.no_grad()
    def _read_weights(self, family: Family, seed: int) -> None:
        device = self.grid.tensor.rank()
        made_here = {VALUE_HEAD}
        entries = [(p, e) for p, e in self._model.entries.items() if not made_here & set(e.names)]
        with TensorFiles(self._source, weight_files(self._source)) as files:
            unknown = unknown_tensors(family, files.shapes)
            if unknown:
                raise ModelError(
                    f"{self._source} has {len(unknown)} tensors that are not in the table of its family, the first is"
                    f" {unknown[0]}\nType  backend=fsdp, or add a table: README of rlcore-megatron, 'Adding a model family'"
                )
            check_names(beyond_last_layer(files.shapes, self._sizes["num_hidden_layers"]), self._source)
            files.check(where for _, entry in entries for where in entry.slices(device))
            for parameter, entry in entries:
                parts = [files.read(where) for where in entry.slices(device)]
                parameter.copy_(entry.weave(parts))
        check_finite(((", ".join(e.names), parameter) for parameter, e in entries), self._source, together=True)
        for parameter, entry in self._model.entries.items():
            if entry.names == (VALUE_HEAD,):
                parameter.copy_(initial_value_head(parameter.shape[1], self._source, seed))
