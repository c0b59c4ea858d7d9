"""What runs inside vLLM's workers: the trainer's log-probs, and whole sets of weights.

vLLM imports this module by name in every worker process (`worker_extension_cls`), before it loads the model.
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
"""The name of the way of weights below, in vLLM's `weight_transfer_config`."""


class WorkerExtension:
    """Methods that vLLM mixes into its worker; `self` is the worker."""

    model_runner: Any
    weight_transfer_engine: Transfer

    def rlcore_prepare(self) -> dict[str, Any]:
        """Put the sampler in place; returns what the caller checks requests against. May be called twice."""
        runner = self.model_runner
        if not isinstance(runner.sampler, TrainerSampler):
            runner.sampler = TrainerSampler("raw_logits", use_fp64_gumbel=runner.sampler.use_fp64_gumbel)
        model_config = runner.model_config
        about = {"path": model_config.model, "precision": str(model_config.dtype).removeprefix("torch.")}
        return {"max_model_len": model_config.max_model_len, **about, **facts_of(model_config.hf_config)}

    def rlcore_missing(self) -> list[str]:
        """Parameters that the update brought nothing for, asked before it is finished."""
        return self.weight_transfer_engine.missing()


class TrainerSampler(Sampler):  # type: ignore[misc]
    """vLLM's sampler, with the log-probs that the trainer computes.

    vLLM offers log-probs before the temperature, or after temperature and truncation. The trainer computes
    log softmax(logits / temperature) before truncation: here the raw logit of the drawn token, divided by the
    temperature, less the logarithm of the sum over all tokens. Greedy rows count as temperature 1.
    """

    def forward(self, logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        """[n, V] logits in; the output's log-probs are [n, 1]."""
        temperature = _temperature(sampling_metadata, logits)
        # Before the call: vLLM divides and truncates the logits in place.
        total = (logits.float() / temperature).logsumexp(dim=-1, keepdim=True)
        output = super().forward(logits, sampling_metadata, *args, **kwargs)
        if output.logprobs_tensors is not None:
            output.logprobs_tensors.logprobs.div_(temperature).sub_(total)
        return output


def _temperature(sampling_metadata: Any, logits: Tensor) -> Tensor:
    """[n, 1] float32, 1 for greedy rows."""
    given: Tensor | None = sampling_metadata.temperature
    if given is None:
        return torch.ones(len(logits), 1, device=logits.device)
    return torch.where(given < 1e-5, 1.0, given)[:, None]


@dataclass
class TransferInit(WeightTransferInitInfo):  # type: ignore[misc]
    """Where the ranks of a server meet the sender of a broadcast, who is rank 0; unused for other ways."""

    address: str
    port: int
    world_size: int
    timeout_s: float


@dataclass
class TransferUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """A part of the weights: tensors where the engine is in the trainer's process, else a safetensors file; or all of them,
    which a broadcast brings."""

    weights: Iterable[tuple[str, Tensor]] = ()
    path: str = ""
    broadcast: bool = False

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        if not self.path:
            # vLLM keeps a tensor until the rest of its layer has come; the lender may use its memory again before.
            yield from ((name, tensor.clone()) for name, tensor in self.weights)
            return
        from safetensors import safe_open

        with safe_open(self.path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  (no mapping)
                yield name, file.get_tensor(name)


class Transfer(WeightTransferEngine[TransferInit, TransferUpdate]):  # type: ignore[misc]
    """Loads weights under their Hugging Face names, layer by layer into the memory that the engine computes with."""

    init_info_cls = TransferInit
    update_info_cls = TransferUpdate

    def init_transfer_engine(self, init_info: TransferInit) -> None:
        """Join the group of a broadcast; all ranks and the sender come here together."""
        replica = self.parallel_config.data_parallel_index * self.parallel_config.world_size
        self._broadcast = Broadcast(
            meet(init_info.address, init_info.port, init_info.timeout_s),
            rank=1 + replica + torch.distributed.get_rank(),
            world_size=init_info.world_size,
            device=str(self.device),
            timeout_s=init_info.timeout_s,
        )

    def start_weight_update(self) -> None:
        """Layers get new memory until they are whole."""
        named = self.model.named_parameters(remove_duplicate=False)
        self._identities = {name: id(parameter) for name, parameter in named}
        self._loaded: set[int] = set()
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """One part. The base class would then wait for an accelerator, which a CPU does not have."""
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except BaseException:
            if update_info.get("broadcast"):
                self._broadcast.drain()  # whoever sends does not wait for a rank that failed
            self.finish_weight_update()  # so that the next update starts from whole layers
            raise
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: TransferUpdate) -> None:
        """Through the model's own loader, which knows how names map and how tensors are split over ranks."""
        if update_info.broadcast:
            update_info = TransferUpdate(weights=self._broadcast.receive())
        loaded = self.model.load_weights(iter(update_info))
        # A loader that does not say what it took cannot be asked; vLLM's own check of files does the same.
        self._loaded |= {self._identities.get(name, 0) for name in (self._identities if loaded is None else loaded)}

    def missing(self) -> list[str]:
        """Parameters without new values; tied ones are one."""
        return [name for name, identity in self._identities.items() if identity not in self._loaded]

    def finish_weight_update(self) -> None:
        """Every layer computes with its new memory."""
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            _pack_tied_heads(self.model)
            _pack_experts(self.model)

    def shutdown(self) -> None:
        """Nothing is held."""


def _pack_tied_heads(model: Any) -> None:
    """The CPU kernels of vLLM pack the weights of each layer that is loaded. A head that has the embedding's is never loaded
    itself, and would go on with what was packed first."""
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead) and _is_shared(layer.weight, model):
            layer.quant_method.process_weights_after_loading(layer)


def _is_shared(weight: Tensor, model: Any) -> bool:
    return sum(getattr(layer, "weight", None) is weight for layer in model.modules()) > 1


def _pack_experts(model: Any) -> None:
    """vLLM packs the experts for its CPU kernel when they are first loaded, and forgets it when new ones come."""
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(layer)


def _register() -> None:
    if TRANSFER not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(TRANSFER, Transfer)


_register()
