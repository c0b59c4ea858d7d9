"""Optional members of plugins, one Protocol each.

The core checks `isinstance(plugin, Protocol)` on a class or an instance and works without a missing member.
`OPTIONAL` lists them by kind. A public name of a plugin that is close to one of these names is reported as a
probable misspelling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np

    from rlcore.data.batch import Batch
    from rlcore.models.size import ModelSize
    from rlcore.protocols.algorithm import EvalConfig, Unit
    from rlcore.protocols.backend import ModelConfig
    from rlcore.protocols.roles import Roles


@runtime_checkable
class DoesWithout(Protocol):
    """An algorithm that trains without a rollout or without rewards."""

    without: Sequence[str]
    """"rollout", "reward", or both."""


@runtime_checkable
class LearnsFromTexts(Protocol):
    """An algorithm that learns from responses in the data: texts or conversations."""

    demonstrations: Sequence[str]
    """Columns with these responses; their presence is checked before the start."""


@runtime_checkable
class LearnsFromLabels(Protocol):
    """An algorithm that learns from labels in the data, such as whether a response is good."""

    labels: Sequence[str]
    """Columns with true or false, or 1 or 0; their values are checked before the start."""


@runtime_checkable
class LearnsTurns(Protocol):
    """An algorithm that learns from conversations in the data, and may learn all of their responses."""

    every_turn: bool
    """True: every message of the assistant; False: the last one."""


@runtime_checkable
class ComparesSamples(Protocol):
    """An algorithm whose advantages compare the samples of a prompt."""

    compares_samples: bool
    """True: warn about a run with one sample per prompt or greedy sampling."""


@runtime_checkable
class CorrectsStaleness(Protocol):
    """An algorithm that can train on samples of older weights (`schedule.max_staleness`)."""

    corrects: bool
    """True if, with these settings, the loss corrects for older weights or is right for samples of any policy."""


@runtime_checkable
class TrainsUnits(Protocol):
    """An algorithm whose loss compares rows, such as those of a pair or a group.

    All rows of a unit are in the same mini-batch and micro-batch, adjacent and in the order of `collect`.
    """

    unit: Unit
    """Unit(column="group_id", size=2): the two samples of a prompt."""


@runtime_checkable
class Evaluates(Protocol):
    """An algorithm with its own evaluation in place of `rlcore.trainer.evaluate`."""

    def evaluate(self, roles: Roles, prompts: Batch, config: EvalConfig) -> tuple[dict[str, float], Batch]:
        """Return metrics, among them `eval/pass_rate` for the display, and the samples."""


@runtime_checkable
class ShowsMetrics(Protocol):
    """An algorithm that chooses metrics for the console."""

    shows: Mapping[str, str]
    """Metric -> label: {"actor/loss": "loss"}."""


@runtime_checkable
class FreesDevice(Protocol):
    """A backend or rollout that can free its device while the other one computes (device sharing)."""

    def frees_device(self, config: Any) -> bool:
        """Return whether these settings allow it. A static method."""


@runtime_checkable
class EstimatesModel(Protocol):
    """A backend that estimates its memory. Without it, the core assumes the whole model on each device."""

    def model_bytes(self, config: Any, num_parameters: int, *, world_size: int, trained: bool) -> int:
        """Return the bytes of parameters, gradients and optimizer on one device. A static method."""


@runtime_checkable
class EstimatesStep(Protocol):
    """A backend whose steps need memory beyond the model and its activations."""

    def working_bytes(self, config: Any, size: ModelSize, *, precision: str, world_size: int, trained: bool) -> int:
        """Return the bytes on one device of, for example, gathered layers and whole gradients. A static method.

        Args:
            trained: False for a frozen model, which runs forward only.
        """


@runtime_checkable
class SplitsRows(Protocol):
    """A backend in which several ranks share the same rows, such as one with tensor parallelism."""

    def data_parallel(self, config: Any, *, model: ModelConfig, world_size: int, device: str) -> int:
        """Return the data-parallel size on "cpu" or "cuda" devices. A static method, called before the start.

        Raises:
            UserError: the model or the settings cannot run on these devices.
        """


@runtime_checkable
class EstimatesEngine(Protocol):
    """A rollout whose settings determine its device memory."""

    def engine_bytes(self, config: Any, weights: int, cache: int, *, device: int) -> int:
        """Return the bytes that it uses on one device. A static method, called before the start.

        Args:
            weights: estimated bytes of the weights on the device.
            cache: estimated bytes of the KV cache on the device.
            device: memory of the device in bytes; 0 on a CPU and if unknown.

        Raises:
            UserError: the engine is not installed.
        """


@runtime_checkable
class ChecksModel(Protocol):
    """A rollout that does not support every model or precision."""

    def check_model(self, config: Any, *, model: ModelConfig, device: str) -> None:
        """Refuse a model that the engine cannot serve on "cpu" or "cuda". A static method, called before the start.

        Raises:
            UserError: the engine cannot serve this model.
        """


@runtime_checkable
class UpdatesInFlight(Protocol):
    """A rollout that can load weights while it generates, which `schedule=async` needs."""

    def in_flight_updates(self, config: Any) -> bool:
        """Return whether these settings allow it; see `Rollout.load_weights`. A static method."""


@runtime_checkable
class CountsTokens(Protocol):
    """A rollout whose long responses count as progress before they finish, which `runtime.call_timeout_s` limits."""

    @property
    def num_tokens(self) -> int:
        """Tokens that it has generated since its start, also of unfinished responses. Read from other threads.

        They are compared with those a few seconds before, so they may be counted in parts of a response.
        """


@runtime_checkable
class Pauses(Protocol):
    """A rollout that can stop in the middle of responses, which `schedule=async` needs in the pool of a trained model."""

    def pause(self) -> None:
        """Stop between two tokens, in the event loop of running calls of `generate`. May be called twice.

        Their requests and new ones wait until `resume`. Meanwhile the engine may sleep and wake, and load weights.
        """

    def resume(self) -> None:
        """Continue all responses under the newest weights, after `wake` if the engine slept. May be called twice."""


@runtime_checkable
class ReshapesSampling(Protocol):
    """A rollout that samples from another distribution than the model's if asked: penalties, structured output."""

    reshapes: Sequence[str]
    """Names in `rlcore.types.RESHAPING` that it applies; a run that sets another one is refused."""


@runtime_checkable
class HasTools(Protocol):
    """An environment with tools that the chat template shows to the model."""

    tools: Sequence[Callable[..., Any]]
    """Typed functions whose docstrings have an `Args:` section."""


@runtime_checkable
class Closes(Protocol):
    """An environment that holds resources."""

    async def close(self) -> None:
        """Release the resources; called once at the end of every episode, even after an error."""


@runtime_checkable
class NamesRows(Protocol):
    """A dataset whose rows have a location for error messages."""

    def where(self, index: int) -> str:
        """Return the location of a row, such as "train.jsonl:17"."""


@runtime_checkable
class Saving(Protocol):
    """A checkpoint being written: the state at the time of the call, unaffected by later training."""

    def finish(self) -> None:
        """Wait until the checkpoint is written, in the thread that calls the backend. Every rank is called."""


@runtime_checkable
class SavesInBackground(Protocol):
    """A backend that can write a checkpoint while training continues."""

    def save_async(self, directory: Path) -> Saving:
        """Save like `save`, but return as soon as training may continue."""


@runtime_checkable
class ShowsPhase(Protocol):
    """A tracker that shows what the run is doing."""

    def phase(self, name: str) -> None:
        """Show that a phase such as "rollout.generate" begins. Called often: return quickly."""


@runtime_checkable
class ShowsDistributions(Protocol):
    """A tracker that shows how values are distributed over all samples of a step."""

    def log_distributions(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        """Record a [B] array for each of "reward", without samples that have none, and "response_length"."""


OPTIONAL: Mapping[str, tuple[type, ...]] = {
    "algorithm": (
        DoesWithout,
        LearnsFromTexts,
        LearnsFromLabels,
        LearnsTurns,
        ComparesSamples,
        CorrectsStaleness,
        TrainsUnits,
        Evaluates,
        ShowsMetrics,
    ),
    "backend": (FreesDevice, EstimatesModel, EstimatesStep, SplitsRows, SavesInBackground),
    "rollout": (FreesDevice, EstimatesEngine, ChecksModel, UpdatesInFlight, CountsTokens, Pauses, ReshapesSampling),
    "environment": (HasTools, Closes),
    "dataset": (NamesRows,),
    "tracker": (ShowsPhase, ShowsDistributions),
}
"""Kind -> the Protocols of its optional members."""
