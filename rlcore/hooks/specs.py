"""The hooks. They run in the controller; a plugin implements any of them with `@rlcore.hookimpl`.

`run` is a `RunView` of the training run. Hooks read it and must not change it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pluggy

if TYPE_CHECKING:
    from rlcore.config.schema import Config
    from rlcore.data.batch import Batch
    from rlcore.protocols.roles import Roles
    from rlcore.types import CallTime

hookspec = pluggy.HookspecMarker("rlcore")
hookimpl = pluggy.HookimplMarker("rlcore")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A check of `rlcore doctor`."""

    name: str
    run: Callable[[], str]
    """Returns the finding; raises if there is a problem."""
    fix: str = ""
    """Command that fixes the problem."""


class CountersView(Protocol):
    """Counters of a run, up to the last finished step, over all its restarts."""

    @property
    def step(self) -> int:
        """Number of finished steps."""

    @property
    def samples(self) -> int:
        """Number of samples trained on."""

    @property
    def tokens(self) -> int:
        """Number of tokens of these samples, prompts included."""


class RunView(Protocol):
    """A training run as hooks see it."""

    @property
    def config(self) -> Config:
        """The composed config."""

    @property
    def directory(self) -> Path:
        """Directory of the run, with checkpoints and metrics; hooks may add files."""

    @property
    def versions(self) -> Mapping[str, str]:
        """Package -> version of rlcore and every plugin in this run."""

    @property
    def counters(self) -> CountersView:
        """Steps, samples and tokens so far."""

    @property
    def roles(self) -> Roles:
        """The groups, to measure a model with their methods, such as `run.roles.actor.log_probs(samples)`.

        Times, bytes and metrics that are noted by these calls belong to no step and are not logged. Return metrics
        from `rlcore_collect_metrics` instead of `roles.note`."""


@hookspec
def rlcore_configure(config: Config) -> None:
    """Check the composed config before anything starts. Raise an error to refuse it."""


@hookspec
def rlcore_worker_env(config: Config, role: str, rank: int) -> Mapping[str, str] | None:
    """Return environment variables for the host of a role; they are set before it imports anything.

    Two plugins that set one variable to different values are an error."""


@hookspec
def rlcore_run_start(run: RunView) -> None:
    """Prepare for a run whose hosts and workers have started, before its first evaluation."""


@hookspec
def rlcore_step_start(run: RunView, step: int) -> None:
    """Prepare for a step, before its prompts are taken. Steps are numbered from 1."""


@hookspec
def rlcore_samples_scored(run: RunView, step: int, samples: Batch) -> None:
    """Inspect the samples of a step and their rewards, before any are dropped. Fetch only the columns you need."""


@hookspec
def rlcore_evaluated(run: RunView, step: int, samples: Batch, calls: Sequence[CallTime]) -> None:
    """Inspect the scored samples of an evaluation; step 0 is the evaluation before training.

    An algorithm with its own `evaluate` decides what `samples` contains. `calls` has the times of the calls."""


@hookspec
def rlcore_step_end(
    run: RunView, step: int, metrics: Mapping[str, float], calls: Sequence[CallTime], experience: Batch
) -> None:
    """Inspect a finished step, after its metrics are logged and before its checkpoint is written.

    `calls` has the times of the step's calls on each rank, and `experience` the samples with the columns that `collect`
    added, such as advantages. Fetch only the rows and columns you need."""


@hookspec
def rlcore_collect_metrics(run: RunView, step: int) -> Mapping[str, float] | None:
    """Return additional metrics of a step. A name that the core or another plugin uses is an error."""


@hookspec
def rlcore_weights_synced(run: RunView, version: int, seconds: float) -> None:
    """Note that the rollouts have received the weights `version`; sending them took `seconds`."""


@hookspec
def rlcore_checkpoint_saved(run: RunView, step: int, path: Path, calls: Sequence[CallTime]) -> None:
    """Process a checkpoint that is complete on disk, for example upload it. `calls` are those that wrote it."""


@hookspec
def rlcore_run_end(run: RunView, error: BaseException | None) -> None:
    """Release resources at the end of a run. `error` is the exception that ended it, or None."""


@hookspec
def rlcore_health_checks() -> list[Check] | None:
    """Return additional checks for `rlcore doctor`."""
