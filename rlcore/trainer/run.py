"""`Run`: the state and the logging of a training run. Created by launch.py, driven by loop.py."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from rlcore.config.build import flatten, to_plain
from rlcore.config.schema import Config
from rlcore.controller.runtime import Runtime
from rlcore.data.batch import Batch
from rlcore.data.columns import INTERNAL_COLUMNS, REWARD_PREFIX
from rlcore.data.text import encodable
from rlcore.errors import RlcoreError, TrackerError
from rlcore.hooks.manager import Hooks
from rlcore.protocols.optional import ShowsDistributions, ShowsPhase
from rlcore.protocols.tracker import SampleRecord, Tracker
from rlcore.trainer.checkpoint import Checkpoints
from rlcore.trainer.evaluate import HeldOut
from rlcore.trainer.recording import record_step
from rlcore.trainer.roles import Roles
from rlcore.trainer.signals import Signals
from rlcore.trainer.step import PromptSource, Step
from rlcore.types import Metrics

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Counters:
    """Counters of a run; part of every checkpoint."""

    step: int = 0
    samples: int = 0
    tokens: int = 0
    skipped_in_a_row: int = 0
    first_reward: float | None = None
    last_reward: float | None = None
    first_eval: float | None = None
    """Pass rate."""
    last_eval: float | None = None
    best: float | None = None
    """Best value of checkpoint.keep_best, negated if lower is better."""
    best_of: str = ""
    """Value of checkpoint.keep_best that `best` belongs to; empty in checkpoints of earlier versions."""
    best_step: int = 0
    """Step of that value; 0: none."""
    without_better: int = 0
    """Values since then."""
    seconds: float = 0.0


@dataclass(slots=True, kw_only=True)
class Run:
    """The controller's side of a training run."""

    config: Config
    directory: Path
    runtime: Runtime
    algorithm: Any
    source: PromptSource
    held_out: HeldOut | None
    checkpoints: Checkpoints
    trackers: Sequence[Tracker]
    hooks: Hooks
    versions: Mapping[str, str]
    """Package -> version of every plugin in this run, written to checkpoints."""
    roles: Roles = field(init=False)
    counters: Counters = field(default_factory=Counters)
    saving: Step = field(default_factory=lambda: Step(number=0))
    """Record of the calls of the checkpoint that is being written."""
    warned_of_gap: bool = False
    lock: TextIO
    """The lock on the run's directory, held while this file is open."""
    signals: Signals = field(init=False)

    def __post_init__(self) -> None:
        self.signals = Signals(lambda: self.phase("stopping after this step; ctrl-C again abandons it"))

    def next_step(self) -> Step:
        """Return a new step, the one after the last that is complete."""
        generated: list[Batch] | None = [] if self.config.schedule.record else None
        return Step(number=self.counters.step + 1, on_wait=self.phase, generated=generated)

    def record(self, step: Step) -> None:
        """Write what a step generated, if the run is recorded."""
        if step.generated:
            self.phase("record")
            record_step(self.directory, step, self.config.sampling.samples_per_prompt)
            step.generated = None

    def note_scored(self, step: Step, samples: Batch) -> None:
        """Pass the scored samples of a step to the hooks."""
        self.hooks.samples_scored(run=self, step=step.number, samples=samples)

    def phase(self, name: str) -> None:
        """Report the current phase to trackers that show it."""
        for tracker in self.trackers:
            if isinstance(tracker, ShowsPhase):
                tracker.phase(name)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step to every tracker."""
        for name, tracker in self._named_trackers():
            with _tracker_errors(name, f"step {step}", self.directory.name):
                tracker.log(step, metrics)

    def log_samples(self, step: Step) -> None:
        """Log a few of the step's samples to every tracker; only these are fetched to the controller."""
        if step.scored is None or self.config.trainer.log_samples == 0:
            return
        rows = spread(step.scored.fetch("group_id").numpy(), self.config.trainer.log_samples, step.number)
        shares: list[Any] = self.roles.during(step).reward.examples(step.scored.take(rows))
        records = [record(step.number, row) for share in shares for row in share]
        for name, tracker in self._named_trackers():
            with _tracker_errors(name, f"step {step.number}", self.directory.name):
                tracker.log_samples(step.number, records)
                if isinstance(tracker, ShowsDistributions):
                    tracker.log_distributions(step.number, distributions(step.scored))

    def close(self, summary: Mapping[str, object]) -> None:
        """Shut down hosts and trackers, and unlock the directory."""
        with ExitStack() as last:  # each callback runs even if others raise
            last.callback(self.signals.restore)
            last.callback(self.lock.close)
            for name, tracker in self._named_trackers():
                last.callback(self._finish, name, tracker, summary)
            self.runtime.shutdown()

    def start_tracker(self, tracker: Tracker, resume_step: int | None) -> None:
        """Start the next tracker; if that fails, only trackers that were started are finished."""
        self.trackers = [*self.trackers, tracker]
        name, _ = self._named_trackers()[-1]
        with _tracker_errors(name, "the start", self.directory.name):
            tracker.start(flatten(self.config), resume_step=resume_step)

    def _finish(self, name: str, tracker: Tracker, summary: Mapping[str, object]) -> None:
        """Finish a tracker without hiding the error that ended the run."""
        try:
            with _tracker_errors(name, "the end", self.directory.name):
                tracker.finish(summary)
        except TrackerError as error:
            if not summary.get("error"):
                raise
            logger.warning("%s", error)

    def _named_trackers(self) -> list[tuple[str, Tracker]]:
        """Return the trackers that were started, with their names in the config."""
        assert len(self.trackers) <= len(self.config.trackers), "more trackers than the config names"
        return [(choice.name, tracker) for choice, tracker in zip(self.config.trackers, self.trackers)]

    def state(self) -> dict[str, Any]:
        """Return the JSON data for a checkpoint, without the files of the roles."""
        counters = {name: getattr(self.counters, name) for name in self.counters.__dataclass_fields__}
        return {
            "step": self.counters.step,
            "counters": counters,
            "loader": self.source.loader.state_dict(),
            "algorithm": self.algorithm.state_dict(),
            "versions": dict(self.versions),
            "config": to_plain(self.config),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore `state`, and warn about changed versions and settings."""
        self.counters = Counters(**state["counters"])
        self.source.loader.load_state_dict(state["loader"])
        self.algorithm.load_state_dict(state["algorithm"])
        for package, version in state["versions"].items():
            if self.versions.get(package) != version:
                logger.warning(
                    "%s was %s when the checkpoint was written, now %s", package, version, self.versions.get(package)
                )
        before, now = flatten(state["config"]), flatten(self.config)
        for name in sorted({*before, *now}):
            if before.get(name) != now.get(name) and not name.startswith("run."):
                logger.warning("%s is now %s; it was %s up to this checkpoint", name, now.get(name), before.get(name))


@contextmanager
def _tracker_errors(name: str, when: str, run_name: str) -> Iterator[None]:
    """Convert any error of a tracker to a TrackerError with its name."""
    try:
        yield
    except RlcoreError:
        raise
    except Exception as error:
        raise TrackerError(
            f"tracker '{name}' failed at {when}: {type(error).__name__}: {error}\n"
            f"Fix it or remove it from  trackers=[...] , and resume with the same command and  run.name={run_name}"
        ) from error


def error_text(error: BaseException) -> str:
    """Return the error that ended a run, in one line."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return "interrupted"
    return f"{type(error).__name__}: {error}".partition("\n")[0]


class Clock:
    """Stopwatch that starts when it is created."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start


def values(metrics: Metrics) -> dict[str, float]:
    """Convert merged metrics to numbers."""
    return {name: mean.value for name, mean in metrics.items()}


def spread(group_id: np.ndarray, count: int, step: int) -> list[int]:
    """Choose up to `count` rows: one of each prompt before a second of any, and different ones in the next step."""
    _, sizes = np.unique(group_id, return_counts=True)
    groups = np.split(np.argsort(group_id, kind="stable"), np.cumsum(sizes)[:-1])
    if count < len(groups):
        groups = [groups[i * len(groups) // count] for i in range(count)]
    rounds = range(max(sizes, default=0))
    rows = [int(group[(step + i) % len(group)]) for i in rounds for group in groups if i < len(group)]
    return sorted(rows[:count])


def distributions(scored: Batch) -> dict[str, np.ndarray]:
    """Return the values of all samples for trackers that show their distribution."""
    reward, length = (column.numpy() for column in scored.fetch("reward", "num_loss_tokens"))
    return {"reward": reward[~np.isnan(reward)], "response_length": length}


def record(step: int, row: Mapping[str, Any]) -> SampleRecord:
    """Convert a row of `RewardWorker.examples` to a record with text that every tracker can encode."""
    rest = {name: value for name, value in row.items() if name not in INTERNAL_COLUMNS}
    parts = {name.removeprefix(REWARD_PREFIX): rest.pop(name) for name in row if name.startswith(REWARD_PREFIX)}
    reward = rest.pop("reward")
    return SampleRecord(
        step=step,
        prompt=encodable(str(rest.pop("prompt"))),
        completion=encodable(rest.pop("completion")),
        reward=reward if row["reward_status"] == 0 else None,
        parts=parts,
        prompt_id=rest.pop("prompt_id"),
        sample_id=rest.pop("sample_id"),
        finish_reason=rest.pop("finish_reason"),
        columns=encodable({name: value for name, value in rest.items() if value is not None}),
    )
