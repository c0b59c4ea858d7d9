"""`Rollout`: an inference engine. `rlcore.rollouts.hf` is an example, `rlcore.testing.FakeRollout` the shortest one.

One instance per engine rank, created inside the host process that owns the device. It handles token ids, not text or
rewards.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rlcore.protocols.backend import ModelConfig
from rlcore.types import Mesh, Request, Sample

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutContext:
    """Facts that the core passes to an engine's constructor."""

    rank: int = 0
    world_size: int = 1
    device: str = "cpu"


class Rollout(Protocol):
    """An inference engine. A class attribute `Config` (dataclass) holds its settings.

    Optional members: `FreesDevice`, `EstimatesEngine`, `ChecksModel`, `UpdatesInFlight`, `CountsTokens`, `Pauses` and
    `ReshapesSampling` of `rlcore.protocols.optional`.
    """

    Config: type

    mesh: Mesh
    """One dp_rank per engine; ranks of one engine share it."""

    def __init__(self, config: Any, *, model: ModelConfig, context: RolloutContext) -> None: ...

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Sample]:
        """Yield one Sample per request as it finishes, in any order. Closing the iterator aborts the rest.

        Calls may overlap in one event loop, since environments send a request after each turn; each call gets its own
        samples.

        A rank whose mesh has `returns=False` gets the same requests; it yields nothing, or takes part and also yields.

        If a prompt does not fit, raise a `SampleError` naming the request before anything is generated."""

    def load_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights, or raise and name what is missing or unknown; the next Sample reports `version`.

        Drop caches of old weights. The tensors are only borrowed: copy what you keep. They may be on another
        device.

        With `UpdatesInFlight`, it may also be called in the event loop of running calls of `generate`, between two of
        their steps, all in one thread that is not the one of the constructor. The responses go on under the new weights, and `token_versions` names the weights that sampled each
        token. After an update that failed, running calls raise, or go on under the old weights."""

    def sleep(self) -> None:
        """Free the device for training. May be called twice."""

    def wake(self) -> None:
        """Get ready to generate again. May be called twice.

        New weights often follow. To leave room for them, allocate the KV cache in the next `generate`."""

    def close(self) -> None:
        """Stop the engine and everything that it started. May be called twice."""
