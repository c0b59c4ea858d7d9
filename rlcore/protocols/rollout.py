"""`Rollout`: an inference engine. `rlcore.rollouts.hf` is the first example, `rlcore.testing.FakeRollout` the shortest.

One instance per engine rank, made inside the host process that owns the device. It knows token ids, not text or rewards.
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
    """What the core tells an engine when it makes it."""

    rank: int = 0
    world_size: int = 1
    device: str = "cpu"


class Rollout(Protocol):
    """An inference engine. A class attribute `Config` (dataclass) holds its own settings.

    Optional members: `TakesTurns`, `EstimatesEngine` and `ChecksModel` of `rlcore.protocols.optional`.
    """

    Config: type

    mesh: Mesh
    """One dp_rank per engine; ranks of one engine share it."""

    def __init__(self, config: Any, *, model: ModelConfig, context: RolloutContext) -> None: ...

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Sample]:
        """Yield one Sample per request as it finishes, in any order. Closing the iterator aborts the rest.

        Calls may overlap in one event loop, as environments ask whenever a turn has ended: each gets its own samples.

        A rank whose mesh does not return gets the same requests; it yields nothing, or takes part and yields them too.

        A prompt that does not fit is a `SampleError` naming the request, before anything is generated."""

    def load_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights, or raise and say what is missing or unknown; the next Sample reports `version`.

        Caches of old weights are dropped. The tensors are only borrowed: copy what you keep. They may lie on another
        device than yours."""

    def sleep(self) -> None:
        """Free the device for training. May be called twice."""

    def wake(self) -> None:
        """Be ready to generate again. May be called twice.

        New weights often come next. To leave room for them, claim memory for the KV cache in the next `generate`."""

    def close(self) -> None:
        """End the engine and everything that it started. May be called twice."""
