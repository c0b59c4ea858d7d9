"""Code that runs in vLLM's workers: a sampler with the trainer's log-probs, and checked weight updates.

vLLM imports this module by name in every worker process (`worker_extension_cls`) before it loads the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.v1.sample.sampler import Sampler

from rlcore.controller.weights import Broadcast, meet
from rlcore_vllm.requests import facts_of

TRANSFER = "rlcore"
"""Name of `WeightReceiver` in vLLM's `weight_transfer_config`."""


class WorkerExtension:
    """Methods that vLLM mixes into its worker; `self` is the worker."""

    model_runner: Any
    weight_transfer_engine: WeightReceiver

    def rlcore_prepare(self) -> dict[str, Any]:
        """Install the sampler and return the limits and properties of the model. Idempotent."""
        runner = self.model_runner
        if not isinstance(runner.sampler, TrainerSampler):
            runner.sampler = TrainerSampler("raw_logits", use_fp64_gumbel=runner.sampler.use_fp64_gumbel)
        model_config = runner.model_config
        about = {"path": model_config.model, "precision": str(model_config.dtype).removeprefix("torch.")}
        return {"max_model_len": model_config.max_model_len, **about, **facts_of(model_config.hf_config)}

    def rlcore_num_tokens(self) -> int:
        """Return the number of tokens that have been sampled."""
        return int(self.model_runner.sampler.num_tokens)

    def rlcore_missing(self) -> list[str]:
        """Return the parameters that the update has not set. Call it before the update is finished."""
        return self.weight_transfer_engine.missing()


class TrainerSampler(Sampler):  # type: ignore[misc]
    """vLLM's sampler with the log-probs that the trainer computes.

    vLLM reports log-probs before temperature, or after temperature and truncation. The trainer computes
    log softmax(logits / temperature) before truncation: the raw logit of the sampled token divided by the temperature,
    minus the logsumexp over all tokens. Greedy rows use temperature 1.
    """

    num_tokens = 0
    """Tokens sampled so far, also those that vLLM discards where it prefills a prompt in parts."""

    def forward(self, logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        """Sample from logits [n, V]; the output's log-probs are [n, 1]."""
        self.num_tokens += len(logits)
        temperature = _temperature(sampling_metadata, logits)
        # Computed before the call, because vLLM scales and truncates the logits in place.
        total = (logits.float() / temperature).logsumexp(dim=-1, keepdim=True)
        output = super().forward(logits, sampling_metadata, *args, **kwargs)
        if output.logprobs_tensors is not None:
            output.logprobs_tensors.logprobs.div_(temperature).sub_(total)
        return output


def _temperature(sampling_metadata: Any, logits: Tensor) -> Tensor:
    """Return the temperatures [n, 1] float32, 1 for greedy rows."""
    given: Tensor | None = sampling_metadata.temperature
    if given is None:
        return torch.ones(len(logits), 1, device=logits.device)
    return torch.where(given < 1e-5, 1.0, given)[:, None]


@dataclass
class TransferInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Rendezvous of a server's ranks with the sender of a broadcast, which is rank 0. Other methods do not use it."""

    address: str
    port: int
    world_size: int
    timeout_s: float


@dataclass
class TransferUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Part of the weights: tensors if the engine is in this process, otherwise the path of a safetensors file. Or all
    weights, if they arrive by broadcast."""

    weights: Iterable[tuple[str, Tensor]] = ()
    path: str = ""
    broadcast: bool = False

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        if not self.path:
            # vLLM keeps a tensor until its layer is complete, but the sender may reuse the memory before that.
            yield from ((name, tensor.clone()) for name, tensor in self.weights)
            return
        from safetensors import safe_open

        with safe_open(self.path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  (no mapping)
                yield name, file.get_tensor(name)


class WeightReceiver(WeightTransferEngine[TransferInit, TransferUpdate]):  # type: ignore[misc]
    """Loader of weights under their Hugging Face names, layer by layer into the memory that the engine computes with."""

    init_info_cls = TransferInit
    update_info_cls = TransferUpdate

    def init_transfer_engine(self, init_info: TransferInit) -> None:
        """Join the process group of a broadcast. All ranks and the sender call this together."""
        replica = self.parallel_config.data_parallel_index * self.parallel_config.world_size
        self._broadcast = Broadcast(
            meet(init_info.address, init_info.port, init_info.timeout_s),
            rank=1 + replica + torch.distributed.get_rank(),
            world_size=init_info.world_size,
            device=str(self.device),
            timeout_s=init_info.timeout_s,
        )

    def start_weight_update(self) -> None:
        """Prepare all layers for reloading; each gets new memory until it is complete."""
        named = self.model.named_parameters(remove_duplicate=False)
        self._identities = {name: id(parameter) for name, parameter in named}
        self._loaded: set[int] = set()
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one part. Overridden because the base class synchronizes with an accelerator, which a CPU lacks."""
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except BaseException:
            if update_info.get("broadcast"):
                self._broadcast.drain()  # so that the sender does not wait for a failed rank
            self.finish_weight_update()  # so that the next update starts from complete layers
            raise
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: TransferUpdate) -> None:
        """Load the weights through the model's own loader, which maps names and splits tensors over ranks."""
        if update_info.broadcast:
            update_info = TransferUpdate(weights=self._broadcast.receive())
        loaded = self.model.load_weights(iter(update_info))
        # A loader that returns None does not report what it loaded; vLLM's own check of files assumes all, too.
        self._loaded |= {self._identities.get(name, 0) for name in (self._identities if loaded is None else loaded)}

    def missing(self) -> list[str]:
        """Return the parameters without new values. Tied parameters count as one."""
        return [name for name, identity in self._identities.items() if identity not in self._loaded]

    def finish_weight_update(self) -> None:
        """Make every layer compute with its new weights."""
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            _pack_tied_heads(self.model)
            _pack_experts(self.model)

    def shutdown(self) -> None:
        """Do nothing; no resources are held."""


def _pack_tied_heads(model: Any) -> None:
    """Pack tied output heads again.

    vLLM's CPU kernels pack the weights of each layer when it is loaded. A head tied to the embedding is never loaded itself
    and would keep its initially packed weights."""
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead) and _is_shared(layer.weight, model):
            layer.quant_method.process_weights_after_loading(layer)


def _is_shared(weight: Tensor, model: Any) -> bool:
    return sum(getattr(layer, "weight", None) is weight for layer in model.modules()) > 1


def _pack_experts(model: Any) -> None:
    """Pack the experts again: vLLM packs them for its CPU kernel only at the first load."""
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(layer)


def _register() -> None:
    if TRANSFER not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(TRANSFER, WeightReceiver)


_register()
