"""Optional members of plugins, one Protocol each.

The core asks `isinstance(plugin, Protocol)`, of a class or an instance, and does without the member where it
is absent. `OPTIONAL` lists them by kind; a public name of a plugin that is nearly one of these names is
reported as a probable misspelling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from rlcore.config.schema import EvalConfig
    from rlcore.data.batch import Batch
    from rlcore.protocols.backend import ModelConfig
    from rlcore.protocols.roles import Roles
    from rlcore.trainer.memory import ModelSize
    from rlcore.types import LossTerms, TokenOutputs


@runtime_checkable
class DoesWithout(Protocol):
    """An algorithm that trains without a rollout or without rewards."""

    without: Sequence[str]
    """"rollout", "reward", or both."""


@runtime_checkable
class LearnsFromTexts(Protocol):
    """An algorithm that learns from responses of the data, which are texts or conversations."""

    demonstrations: Sequence[str]
    """Columns with these responses; their presence is checked before the start."""


@runtime_checkable
class ComparesSamples(Protocol):
    """An algorithm whose advantages compare the samples of a prompt."""

    compares_samples: bool
    """True: a run with one sample per prompt, or greedy sampling, is warned about."""


@runtime_checkable
class Evaluates(Protocol):
    """An algorithm with its own evaluation in place of `rlcore.trainer.evaluate`."""

    def evaluate(self, roles: Roles, prompts: Batch, config: EvalConfig) -> tuple[dict[str, float], Batch]:
        """Return metrics, among them `eval/pass_rate` for the display, and the samples."""


@runtime_checkable
class ShowsMetrics(Protocol):
    """An algorithm with metrics of its own on the console."""

    shows: Mapping[str, str]
    """Metric -> label: {"actor/loss": "loss"}."""


@runtime_checkable
class HasValueLoss(Protocol):
    """An algorithm that trains a critic."""

    def value_loss(self, out: TokenOutputs, batch: Batch) -> LossTerms:
        """Return the critic's loss terms: a pure function on a micro-batch, as `loss`."""


@runtime_checkable
class TakesTurns(Protocol):
    """A backend or rollout that can free its device while the other one computes."""

    def takes_turns(self, config: Any) -> bool:
        """Return whether it can under these settings. A static method."""


@runtime_checkable
class EstimatesModel(Protocol):
    """A backend that estimates its memory. Without it, each device is expected to hold the whole model."""

    def model_bytes(self, config: Any, num_parameters: int, *, world_size: int, trained: bool) -> int:
        """Return the bytes of parameters, gradients and optimiser on one device. A static method."""


@runtime_checkable
class EstimatesStep(Protocol):
    """A backend whose steps hold more than the model and its activations."""

    def working_bytes(self, config: Any, size: ModelSize, *, precision: str, world_size: int, trained: bool) -> int:
        """Return the bytes on one device of, for example, gathered layers and whole gradients. A static method.

        Args:
            trained: False for a frozen model, which runs forward only.
        """


@runtime_checkable
class SplitsRows(Protocol):
    """A backend whose ranks do not all get rows of their own, such as one with tensor parallelism."""

    def data_parallel(self, config: Any, *, model: ModelConfig, world_size: int, device: str) -> int:
        """Return the data-parallel size on "cpu" or "cuda" devices. A static method, called before the start.

        Raises:
            UserError: the model or the settings cannot run on these devices.
        """


@runtime_checkable
class EstimatesEngine(Protocol):
    """A rollout whose settings decide how much of a device it takes."""

    def engine_bytes(self, config: Any, weights: int, cache: int, *, device: int) -> int:
        """Return the bytes it takes on one device. A static method, called before the start.

        Args:
            weights: estimate of what the weights need there.
            cache: estimate of what the KV cache needs there.
            device: bytes of the device; 0 on a CPU and where it is not known.

        Raises:
            UserError: the engine is not installed.
        """


@runtime_checkable
class ChecksModel(Protocol):
    """A rollout that cannot serve every model, or not in every precision."""

    def check_model(self, config: Any, *, model: ModelConfig, device: str) -> None:
        """Refuse what the engine cannot serve on "cpu" or "cuda". A static method, called before the start.

        Raises:
            UserError: the engine would not start.
        """


@runtime_checkable
class HasTools(Protocol):
    """An environment with tools that the chat template shows to the model."""

    tools: Sequence[Callable[..., Any]]
    """Typed functions with a docstring that has an `Args:` section."""


@runtime_checkable
class Closes(Protocol):
    """An environment that holds something open."""

    async def close(self) -> None:
        """Release it; called once at the end of every episode, however it ended."""


@runtime_checkable
class NamesRows(Protocol):
    """A data set whose rows have a place that error messages can name."""

    def where(self, index: int) -> str:
        """Return the place of a row, such as "train.jsonl:17"."""


@runtime_checkable
class Saving(Protocol):
    """A checkpoint that is being written: the state at the time of the call, whatever is trained since."""

    def finish(self) -> None:
        """Wait until it is written, in the thread that calls the backend. Every rank is called."""


@runtime_checkable
class SavesInBackground(Protocol):
    """A backend that can write a checkpoint while training continues."""

    def save_async(self, directory: Path) -> Saving:
        """As `save`, but return as soon as training may continue."""


@runtime_checkable
class ShowsPhase(Protocol):
    """A tracker that shows what the run is doing."""

    def phase(self, name: str) -> None:
        """Show that a phase such as "rollout.generate" begins; called often, so be quick."""


OPTIONAL: Mapping[str, tuple[type, ...]] = {
    "algorithm": (DoesWithout, LearnsFromTexts, ComparesSamples, Evaluates, ShowsMetrics, HasValueLoss),
    "backend": (TakesTurns, EstimatesModel, EstimatesStep, SplitsRows, SavesInBackground),
    "rollout": (TakesTurns, EstimatesEngine, ChecksModel),
    "environment": (HasTools, Closes),
    "dataset": (NamesRows,),
    "tracker": (ShowsPhase,),
}
"""Kind -> the Protocols of its optional members."""
