"""The hooks. All of them run on the controller; a plugin implements any of them with `@rlcore.hookimpl`.

`run` is a `RunView` of the training run: read it, and change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pluggy

if TYPE_CHECKING:
    from rlcore.config.schema import Config
    from rlcore.data.batch import Batch
    from rlcore.protocols.roles import Roles

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
        """Directory of the run: checkpoints, metrics and files of your own."""

    @property
    def versions(self) -> Mapping[str, str]:
        """Package -> version of rlcore and every plugin in this run."""

    @property
    def counters(self) -> CountersView:
        """Steps, samples and tokens so far."""

    @property
    def roles(self) -> Roles:
        """The groups, to measure a model with their methods, such as `run.roles.actor.log_probs(samples)`."""


@hookspec
def rlcore_configure(config: Config) -> None:
    """Called when the config is composed and nothing is started. Raise to refuse the config."""


@hookspec
def rlcore_worker_env(config: Config, role: str, rank: int) -> Mapping[str, str] | None:
    """Return environment variables for the host of a role, which are set before it imports anything.

    It is an error if two plugins set a name to different values."""


@hookspec
def rlcore_run_start(run: RunView) -> None:
    """Called when hosts and workers are running, before the first evaluation."""


@hookspec
def rlcore_step_start(run: RunView, step: int) -> None:
    """Called at the start of a step; steps count from 1."""


@hookspec
def rlcore_samples_scored(run: RunView, step: int, samples: Batch) -> None:
    """Called when the samples of a step have rewards, before any is dropped. Fetch only the columns you need."""


@hookspec
def rlcore_evaluated(run: RunView, step: int, samples: Batch) -> None:
    """Called when held-out samples have rewards, or what the algorithm's own evaluation returns; step 0 is before
    training."""


@hookspec
def rlcore_step_end(run: RunView, step: int, metrics: Mapping[str, float]) -> None:
    """Called when a step is done and logged, before its checkpoint."""


@hookspec
def rlcore_collect_metrics(run: RunView, step: int) -> Mapping[str, float] | None:
    """Return your metrics for this step. It is an error to reuse a name of the core or another plugin."""


@hookspec
def rlcore_weights_synced(run: RunView, version: int, seconds: float) -> None:
    """Called when the rollout has the actor's weights as `version`."""


@hookspec
def rlcore_checkpoint_saved(run: RunView, step: int, path: Path) -> None:
    """Called when a checkpoint is complete on disk."""


@hookspec
def rlcore_run_end(run: RunView, error: BaseException | None) -> None:
    """Called when the run ends, whether it succeeded or not."""


@hookspec
def rlcore_health_checks() -> list[Check] | None:
    """Return your checks for `rlcore doctor`."""
