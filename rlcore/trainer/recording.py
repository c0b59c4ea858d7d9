"""Recorded rollouts: the samples of every step, and training from them without an engine.

    RUN/steps/recording.json    fingerprints of the data, the seed, and the samples per prompt
    RUN/steps/000017/           the samples of step 17, a recorded batch (`rlcore.data.recorded`)

`schedule.record=true` writes them. With `schedule.replay=RUN`, `Replay` takes the place of the engine: each step gets
the prompts and samples of the recorded one, whatever schedule they were generated with.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlcore.controller.ref import BatchRef, Store
from rlcore.data.batch import Batch
from rlcore.data.columns import REWARD_PREFIX
from rlcore.data.loader import PromptLoader
from rlcore.data.recorded import open_batch, save_batch
from rlcore.errors import ConfigError, DataError, RunError
from rlcore.protocols.algorithm import RoleSpec
from rlcore.protocols.roles import Roles
from rlcore.trainer.step import PromptSource, Step
from rlcore.types import LossTerms, Metrics, TokenOutputs

logger = logging.getLogger(__name__)
STEPS = "steps"
_ABOUT = "recording.json"
_SCORES = ("reward", "reward_status", "completion", "model_score")


def prepare(run: Path, loader: PromptLoader, done: int) -> None:
    """Prepare the directory of a recording that continues after step `done`; later steps of it are removed.

    Those of another run are kept under another name.
    """
    directory = run / STEPS
    if directory.exists() and not done:
        number = 1
        while (old := run / f"{STEPS}.{number}").exists():
            number += 1
        directory.rename(old)
        logger.warning("the recorded steps of an earlier run are now in %s", old)
    directory.mkdir(exist_ok=True)
    recorded = recorded_steps(directory)
    for step in recorded:
        if step > done:
            shutil.rmtree(directory / f"{step:06d}")
    if missing := sorted({*range(1, done + 1)} - {*recorded}):
        logger.warning("%d steps before step %d are not recorded, first step %d", len(missing), done + 1, missing[0])
    (directory / _ABOUT).write_text(json.dumps(loader.identity))


def record_step(run: Path, step: Step, samples_per_prompt: int) -> None:
    """Write what a step generated, with the scores if they are of the same samples.

    Raises:
        RunError: the step generated twice for a prompt; the disk is full.
        DataError: a column of the data set holds objects that JSON cannot represent.
    """
    assert step.generated, f"step {step.number} generated nothing"
    samples = Batch.cat([it.local() for it in step.generated])
    positions = samples["group_id"][::samples_per_prompt].tolist()
    if len(set(positions)) < len(positions) or len(positions) * samples_per_prompt != len(samples):
        raise RunError(
            f"step {step.number}: the algorithm called roles.generate twice with one prompt, which cannot be recorded\n"
            "Type  schedule.record=false"
        )
    scored = step.scored
    if scored is not None and torch.equal(scored.fetch("sample_id"), samples["sample_id"]):
        samples |= scored.select(*(name for name in scored.columns if _is_score(name))).local()
    save_batch(samples, run / STEPS / f"{step.number:06d}")


def recorded_steps(directory: Path) -> list[int]:
    """Return the numbers of the recorded steps in a directory, sorted."""
    return sorted(int(it.name) for it in directory.iterdir() if it.name.isdigit())


def check_recording(replay: str, loader: PromptLoader, steps: range, prompts_per_step: int) -> None:
    """Check that a recording has all steps of a run, and was made with the same data.

    Raises:
        UserError: it has not, with the line to type.
    """
    directory, setting = Path(replay) / STEPS, f"schedule.replay={replay}"
    try:
        identity = dict(json.loads((directory / _ABOUT).read_text()))
        recorded = recorded_steps(directory)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{setting} is not a recording: {error}\n"
            "Record one:  rlcore train … schedule.record=true   or  rlcore rollout MODEL DIR"
        ) from error
    loader.check(identity, f"the recording in {replay}", "or record again with schedule.record=true")
    missing = sorted(set(steps) - set(recorded))
    if missing:
        last = max((step for step in recorded if step < missing[0]), default=0)
        hint = f"Type  trainer.steps={last}" if last else "Record it again:  schedule.record=true"
        raise ConfigError(f"{setting} has no step {missing[0]}, and trainer.steps={steps.stop - 1}\n{hint}")
    if steps:
        groups = len(set(open_batch(directory / f"{steps.start:06d}")["group_id"].tolist()))
        if groups < prompts_per_step:
            raise ConfigError(
                f"{setting} has {groups} prompts in step {steps.start}, fewer than trainer.prompts_per_step"
                f"={prompts_per_step}\nType  trainer.prompts_per_step={groups}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateConfig:
    """No settings."""


class Generate:
    """The algorithm of `rlcore rollout`: it generates and scores, and trains nothing."""

    Config = GenerateConfig

    def __init__(self, config: GenerateConfig) -> None:
        self.config = config

    def roles(self) -> Sequence[RoleSpec]:
        return [RoleSpec(name="actor", worker="policy", loss="")]

    def reads(self) -> Mapping[str, Sequence[str]]:
        return {}

    def writes(self) -> Sequence[str]:
        return []

    def collect(self, roles: Roles, prompts: Batch) -> Batch:
        return roles.score(roles.generate(prompts))

    def loss(self, out: TokenOutputs, batch: Batch) -> LossTerms:
        raise NotImplementedError

    def update(self, roles: Roles, experience: Batch) -> Metrics:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class Replay:
    """Prompts and samples of a recording, in the place of a `Prefetcher`."""

    def __init__(
        self, replay: str, source: PromptSource, store: Store, samples_per_prompt: int, trained: Sequence[Any]
    ) -> None:
        """Create a replay; the groups of `trained` roles learn which version the recorded engine had."""
        self._directory, self._source, self._store = Path(replay) / STEPS, source, store
        self._trained = trained
        self._per_prompt = samples_per_prompt
        self._step = 0
        self._samples: BatchRef | None = None
        self._rows: dict[int, int] = {}
        """Position of a group -> its first row in `_samples`."""
        self._waiting: list[int] = []
        """Positions that the step has not taken."""
        self._warned = False

    def take(self, count: int, step: Step) -> Batch:
        """Return the next prompts of the recorded step.

        Raises:
            UserError: the step has no more, or its directory is missing or damaged.
        """
        if step.number != self._step:
            self._open(step.number)
        positions, self._waiting = self._waiting[:count], self._waiting[count:]
        if len(positions) < count:
            raise ConfigError(
                f"step {step.number} needs more prompts than the {len(self._rows)} that {self._directory} has for it\n"
                "Use the settings of data and trainer that it was recorded with, or record again: "
                " schedule.record=true"
            )
        self._source.loader.issue_at(positions)
        step.positions += positions
        return self._source.at(positions)

    def samples(self, prompts: Batch) -> Batch:
        """Return the recorded samples of prompts that this step took, in their order.

        Raises:
            ConfigError: the algorithm changed the prompts.
        """
        positions = prompts.fetch("group_id").tolist()
        assert self._samples is not None, "no step was taken"
        if not set(positions) <= self._rows.keys():
            raise ConfigError(
                f"step {self._step}: the algorithm generates for prompts that were not recorded\n"
                "Train with an engine:  schedule.replay=''"
            )
        rows = [self._rows[position] + number for position in positions for number in range(self._per_prompt)]
        return self._samples.take(rows)

    def scored(self, samples: Batch, step: Step, score: Callable[[Batch], Batch]) -> Batch:
        """Return the samples with their scores, which are computed now."""
        return score(samples)

    def before_weights(self, step: Step) -> None:
        """Count a version, as if an engine received it, and warn if the step did not use all of its recording."""
        for group in self._trained:
            group.sampled_by_engine(step.number)
        if self._waiting and not self._warned:
            self._warned = True
            logger.warning(
                "step %d used %d of its %d recorded prompts; the others are left out, also in later steps",
                *(step.number, len(self._rows) - len(self._waiting), len(self._rows)),
            )

    def balance(self, step: Step, seconds: float) -> dict[str, float]:
        """Return no metrics: nothing is generated."""
        return {}

    def save(self, directory: Path, step: int) -> None:
        """Write nothing: the recording is the state."""

    def load(self, directory: Path, step: int) -> None:
        """Read nothing."""

    def _open(self, number: int) -> None:
        directory = self._directory / f"{number:06d}"
        samples = open_batch(directory)
        first = samples.take(range(0, len(samples), self._per_prompt)).select("group_id", "prompt_id")
        positions = first["group_id"].tolist()
        whole = torch.equal(samples["group_id"], first["group_id"].repeat_interleave(self._per_prompt)[: len(samples)])
        loader = self._source.loader
        if not whole or [loader.at(it).prompt_id for it in positions] != first["prompt_id"].tolist():
            raise DataError(
                f"{directory} does not hold the prompts of the data\nRecord it again:  schedule.record=true"
            )
        samples = samples.drop(*(name for name in samples.columns if _is_score(name)))
        self._samples = BatchRef.publish(samples, self._store)
        self._rows = {position: self._per_prompt * i for i, position in enumerate(positions)}
        self._step, self._waiting = number, positions


def _is_score(name: str) -> bool:
    """Return whether a column is computed again from the samples."""
    return name in _SCORES or name.startswith(REWARD_PREFIX)
