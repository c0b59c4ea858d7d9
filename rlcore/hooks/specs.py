"""The hooks. All of them run on the controller; a plugin implements the ones that it wants, with `@rlcore.hookimpl`.

`run` is the `rlcore.trainer.run.Run`; treat it as read-only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from rlcore.config.schema import Config
    from rlcore.data.batch import Batch
    from rlcore.trainer.run import Run

hookspec = pluggy.HookspecMarker("rlcore")
hookimpl = pluggy.HookimplMarker("rlcore")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that `rlcore doctor` looks at."""

    name: str
    run: Callable[[], str]
    """Returns what was found; raises when something is wrong."""
    fix: str = ""
    """The line to type."""


@hookspec
def rlcore_configure(config: Config) -> None:
    """The config is composed and nothing is started. Raise to refuse it."""


@hookspec
def rlcore_worker_env(config: Config, role: str, rank: int) -> Mapping[str, str] | None:
    """Environment variables for the host of a role, set before it imports anything.

    Two plugins that set one name to different values are an error."""


@hookspec
def rlcore_run_start(run: Run) -> None:
    """Hosts and workers are up; the first evaluation comes next."""


@hookspec
def rlcore_step_start(run: Run, step: int) -> None:
    """A step begins; steps count from 1."""


@hookspec
def rlcore_samples_scored(run: Run, step: int, samples: Batch) -> None:
    """The samples of a step have rewards; none has been dropped yet. Fetch only the columns you need."""


@hookspec
def rlcore_step_end(run: Run, step: int, metrics: Mapping[str, float]) -> None:
    """A step is done and logged; its checkpoint, if one is due, comes next."""


@hookspec
def rlcore_collect_metrics(run: Run, step: int) -> Mapping[str, float] | None:
    """Metrics of yours for this step. A name that the core or another plugin has given is an error."""


@hookspec
def rlcore_weights_synced(run: Run, version: int, seconds: float) -> None:
    """The rollout has the actor's weights as `version`."""


@hookspec
def rlcore_checkpoint_saved(run: Run, step: int, path: Path) -> None:
    """A checkpoint is on the disk, complete."""


@hookspec
def rlcore_run_end(run: Run, error: BaseException | None) -> None:
    """The run ends, well or not; always called."""


@hookspec
def rlcore_health_checks() -> list[Check] | None:
    """Checks of yours for `rlcore doctor`."""
