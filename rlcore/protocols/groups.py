"""The groups of the built-in roles as algorithms see them, one Protocol for each role.

`rlcore.workers` implements them; a group of another worker class is `roles.group(name, WorkerClass)`. Every method
runs on all workers of its group and returns the combined result. `submit` starts it and returns at once:

    pending = roles.actor.log_probs.submit(samples)
    samples |= pending.result()
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from rlcore.types import Counts, Metrics, Sampling

if TYPE_CHECKING:
    from rlcore.data.batch import Batch

P = ParamSpec("P")
R = TypeVar("R", covariant=True)


class Pending(Protocol[R]):
    """A call of a group that may still be running."""

    def result(self) -> R:
        """Wait for the result, at most until the call's deadline."""


class GroupMethod(Protocol[P, R]):
    """A method of a group."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> Pending[R]:
        """Start the call and return at once."""


class ModelGroup(Protocol):
    """A group whose workers hold a model and samples."""

    @property
    def dp_size(self) -> int:
        """Number of shares that the rows of a batch are split into."""

    @property
    def apply(self) -> GroupMethod[Concatenate[Callable[..., Batch], Batch, ...], Batch]:
        """Run a pure module-level function on the rows where they are stored; it returns new columns for these rows."""


class TrainedGroup(ModelGroup, Protocol):
    """A group whose model is trained with the algorithm's loss."""

    @property
    def update(self) -> GroupMethod[[Batch, Counts], Metrics]:
        """Take one optimizer step on a mini-batch, given the counts of the whole mini-batch."""


class ActorGroup(TrainedGroup, Protocol):
    """The trained policy."""

    @property
    def log_probs(self) -> GroupMethod[[Batch], Batch]:
        """Compute the columns `log_probs` and `entropy`, zero outside `loss_mask`."""


class ReferenceGroup(ModelGroup, Protocol):
    """The frozen initial policy."""

    @property
    def log_probs(self) -> GroupMethod[[Batch], Batch]:
        """Compute the column `ref_log_probs`, zero outside `loss_mask`."""


class CriticGroup(TrainedGroup, Protocol):
    """The value model of PPO."""

    @property
    def values(self) -> GroupMethod[[Batch], Batch]:
        """Compute the column `values`, zero outside `loss_mask`."""


class RolloutGroup(Protocol):
    """The inference engines."""

    @property
    def generate(self) -> GroupMethod[[Batch, Sampling, int], Batch]:
        """Generate this number of samples for each prompt, adjacent and in prompt order."""


class RewardGroup(Protocol):
    """The processes that score samples."""

    @property
    def score(self) -> GroupMethod[[Batch], Batch]:
        """Compute `reward`, `reward:<name>` and the other columns of the rewards."""

    @property
    def examples(self) -> GroupMethod[[Batch], list[dict[str, Any]]]:
        """Return scored samples as plain dicts, with long texts shortened."""
