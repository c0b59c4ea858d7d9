"""`Backend`: how one model is trained. `rlcore.backends.local` is the first example and the oracle of the contract tests.

One instance per rank of a role, made inside the host process that owns the device. Policy, critic and reference workers
call it; it knows nothing of rewards, prompts or algorithms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from rlcore.types import LossFunction, Mesh, Metrics, TokenOutputs

if TYPE_CHECKING:
    from torch import Tensor

    from rlcore.data.batch import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, and how it is computed."""

    path: str
    """Directory in Hugging Face layout: config.json, safetensors, tokenizer."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Type of the matrix products; parameters and optimiser stay float32."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    max_tokens_per_device: int = 16384
    """Tokens in one micro-batch; a single longer sample is a micro-batch of its own."""

    def __post_init__(self) -> None:
        _at_least(self, max_tokens_per_device=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its learning-rate schedule."""

    lr: float = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    """Optimiser steps of linear warm-up."""
    min_lr_ratio: float = 0.1
    """Linear and cosine end at lr times this."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad_norm: float = 1.0
    """0 turns clipping off."""

    def __post_init__(self) -> None:
        _at_least(self, lr=0, warmup_steps=0, min_lr_ratio=0, eps=0, weight_decay=0, clip_grad_norm=0)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(
                f"betas: expected two numbers from 0 to below 1, got {self.betas}\nType  betas=[0.9,0.999]"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendContext:
    """What the core tells a backend when it makes it."""

    rank: int = 0
    world_size: int = 1
    device: str = "cpu"
    """"cpu" or "cuda:0": a host sees only its own device."""
    head: Literal["token", "value"] = "token"
    """"token": log-probs and entropy; "value": a value head on the last hidden state."""
    trained: bool = True
    """False for a frozen model: no optimiser is made, forward only."""
    total_steps: int = 0
    """Optimiser steps of the whole run, for the schedule; 0 when unknown."""
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    """What the host adds, such as the rendezvous address under "init_method"."""


def _at_least(config: Any, **lowest: float) -> None:
    """Refuse settings below their lowest value, infinite or NaN."""
    for name, low in lowest.items():
        value, default = getattr(config, name), type(config).__dataclass_fields__[name].default
        if not low <= value < math.inf:
            raise ValueError(f"{name}: expected {low} or more, got {value}\nType  {name}={default}")


class Backend(Protocol):
    """One rank of one model. A class attribute `Config` (dataclass) holds the backend's own settings.

    Optional members: `TakesTurns`, `EstimatesModel`, `EstimatesStep`, `SplitsRows` and `SavesInBackground` of
    `rlcore.protocols.optional`.

    When `world_size > 1` the host has initialised `torch.distributed` before the backend is made; the backend may make
    sub-groups. Collective calls are allowed in every method but `offload`, as every rank gets every call.
    """

    Config: type

    mesh: Mesh
    """This rank's coordinates; asked once, after construction."""

    def __init__(
        self, config: Any, *, model: ModelConfig, optimizer: OptimizerConfig, context: BackendContext
    ) -> None: ...

    def forward(self, batch: Batch, *, temperature: float) -> TokenOutputs:
        """Log-probs and entropy (or values) of the tokens under `loss_mask`, without gradient, in batch order.

        You get this rank's share: columns `input_ids` and `loss_mask`, perhaps no rows at all. Never build a
        float32 copy of [T, V]."""

    def forward_backward(self, batch: Batch, loss: LossFunction, *, temperature: float) -> Metrics:
        """Accumulate gradients of the loss over this rank's share, in micro-batches of your choice.

        Call `loss(outputs, micro_batch)`; the sum of its scalars over all micro-batches and data-parallel ranks is the
        loss of the mini-batch, so gradients are summed, never averaged, over ranks. May be called several times
        before `step`. Returns the merged metrics of this rank."""

    def step(self) -> Metrics:
        """Sum gradients over ranks, clip, optimise, zero. Returns grad_norm and lr.

        A gradient that is not finite: change nothing, return `skipped` = Mean(1)."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter under its Hugging Face name, streamed; never a second whole copy. All ranks are called.

        Asked while the model is offloaded, too: from where it is, one at a time."""

    def save(self, directory: Path) -> None:
        """Write model and optimiser into an existing empty directory, each rank its share. Safetensors, no pickles."""

    def load(self, directory: Path) -> None:
        """The inverse of `save`; another world size is allowed. Nothing changes when something is missing."""

    @staticmethod
    def export(source: Path, target: Path) -> None:
        """Write what `save` left in `source` as a Hugging Face model into the existing directory `target`.

        Called by `rlcore export` in a process without devices or process group; the core adds the tokenizer."""

    def offload(self) -> None:
        """Free the device for the rollout. May be called twice."""

    def reload(self) -> None:
        """Come back to the device. May be called twice."""
