"""`Backend`: trains one model. `rlcore.backends.local` is the example and the reference for the contract tests.

One instance per rank of a role, created inside the host process that owns the device. Policy, critic and reference
workers call it; it knows nothing about rewards, prompts or algorithms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from rlcore.errors import require, require_at_least
from rlcore.types import LossFunction, Mesh, Metrics, TokenOutputs

if TYPE_CHECKING:
    from torch import Tensor

    from rlcore.data.batch import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model and its numerics."""

    path: str
    """Directory in Hugging Face layout: config.json, safetensors, tokenizer."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Other values for config.json, in training, generation and exported models: {rope_parameters: {rope_theta: 1e6}}. The
    changed file is in the cache of this user, ~/.cache/rlcore; several nodes need a home directory that they share."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Type of the matrix products; parameters and optimizer state stay float32. There is no float16: gradients underflow
    in its range, and bfloat16 has the same speed."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    max_tokens_per_device: int = 16384
    """Maximum number of tokens in a micro-batch; a longer sample, or unit of samples, is a micro-batch by itself."""

    def __post_init__(self) -> None:
        require_at_least(self, max_tokens_per_device=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """The optimizer and its learning-rate schedule."""

    name: Literal["adamw", "sgd"] = "adamw"
    """Kind of optimizer."""
    lr: float = 1e-6
    """Learning rate after warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning-rate decay after warm-up, over the whole run."""
    warmup_steps: int = 0
    """Length of the linear warm-up, in optimizer steps."""
    warmup_ratio: float = 0.0
    """The same as a fraction of all optimizer steps of the run, rounded up; in place of warmup_steps."""
    min_lr_ratio: float = 0.1
    """Final learning rate of linear and cosine, as a fraction of lr."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW: decay rates of the first and second moment."""
    momentum: float = 0.0
    """SGD: momentum."""
    eps: float = 1e-8
    """AdamW: term added to the denominator."""
    weight_decay: float = 0.0
    """AdamW: decoupled weight decay. SGD: L2 penalty."""
    clip_grad_norm: float = 1.0
    """Maximum global gradient norm; 0 disables clipping."""

    def __post_init__(self) -> None:
        require_at_least(self, lr=0, warmup_steps=0, min_lr_ratio=0, eps=0, weight_decay=0, clip_grad_norm=0)
        require(0 <= self.warmup_ratio <= 1, "warmup_ratio", "a number from 0 to 1", self.warmup_ratio, 0.03)
        both = self.warmup_ratio > 0 and self.warmup_steps > 0
        require(not both, "warmup_ratio", "0 with warmup_steps", self.warmup_ratio, 0)
        require(0 <= self.momentum < 1, "momentum", "a number from 0 to below 1", self.momentum, 0.9)
        require(not self.momentum or self.name == "sgd", "momentum", "0 without name=sgd", self.momentum, 0)
        betas = all(0 <= beta < 1 for beta in self.betas)
        require(betas, "betas", "two numbers from 0 to below 1", self.betas, "[0.9,0.999]")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendContext:
    """Facts that the core passes to a backend's constructor."""

    rank: int = 0
    world_size: int = 1
    device: str = "cpu"
    """"cpu" or "cuda:0": a host sees only its own device."""
    head: Literal["token", "value"] = "token"
    """"token": log-probs and entropy; "value": a value head on the last hidden state."""
    trained: bool = True
    """False for a frozen model: forward only, no optimizer."""
    total_steps: int = 0
    """Optimizer steps of the whole run, for the schedule; 0 if unknown."""
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    """Entries added by the host, such as the rendezvous address under "init_method"."""


class Backend(Protocol):
    """One rank of one model. A class attribute `Config` (dataclass) holds the backend's own settings.

    Optional members: `FreesDevice`, `EstimatesModel`, `EstimatesStep`, `SplitsRows` and `SavesInBackground` of
    `rlcore.protocols.optional`.

    If `world_size > 1`, the host has initialized `torch.distributed` before it creates the backend; the backend may
    create sub-groups. Every rank gets every call, so collectives are allowed in every method except `offload`.
    """

    Config: type

    mesh: Mesh
    """This rank's coordinates; read once, after construction."""

    def __init__(
        self, config: Any, *, model: ModelConfig, optimizer: OptimizerConfig, context: BackendContext
    ) -> None: ...

    def forward(self, batch: Batch, *, temperature: float) -> TokenOutputs:
        """Return log-probs and entropy (or values) of the tokens under `loss_mask`, without gradient, in batch order.

        The batch is this rank's share, with columns `input_ids` and `loss_mask`; it may have no rows. Never build a
        float32 copy of [T, V]."""

    def forward_backward(self, batch: Batch, loss: LossFunction, *, temperature: float) -> Metrics:
        """Accumulate gradients of the loss over this rank's share, split into micro-batches as you like.

        Call `loss(outputs, micro_batch)`. The loss of the mini-batch is the sum of the returned scalars over all
        micro-batches and data-parallel ranks, so sum gradients over ranks, never average them. May be called several
        times before `step`. Return the merged metrics of this rank."""

    def step(self) -> Metrics:
        """Sum gradients over ranks, clip, update, zero. Return grad_norm and lr.

        If a gradient is not finite, change nothing and return `skipped` = Mean(1)."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Stream every parameter under its Hugging Face name, without a second full copy. All ranks are called.

        Also called while the model is offloaded: yield one parameter at a time from where it is."""

    def load_weights(self, weights: Iterator[tuple[str, Tensor]], mix: float = 1.0) -> None:
        """Set each parameter p to (1 - mix) · p + mix · new, from the `weights` of another backend with the same model.

        Every rank is called and gets every full tensor, of any floating dtype, valid until the next one is requested.
        mix=1 copies exactly. The optimizer's state, its number of steps and a value head stay as they are. Never called
        between `forward_backward` and `step`. Also called while the model is offloaded: update it where it is.

        Raise UserError if a parameter is missing, unknown, repeated or has another shape, and then, until all weights
        have been loaded with mix=1 or from a checkpoint, in every method that uses the parameters."""

    def save(self, directory: Path) -> None:
        """Write model and optimizer into an existing empty directory, each rank its share; safetensors, no pickles.

        Also called for a frozen model that got other weights."""

    def load(self, directory: Path) -> None:
        """Load what `save` wrote, possibly with another world size. If something is missing, change nothing."""

    @staticmethod
    def export(source: Path, target: Path) -> None:
        """Convert the checkpoint that `save` wrote to `source` into a Hugging Face model in the existing `target`.

        `rlcore export` calls it in a process without devices or process group; the core adds the tokenizer."""

    def offload(self) -> None:
        """Free the device for the rollout. May be called twice."""

    def reload(self) -> None:
        """Move back to the device. May be called twice."""
