"""`Prefetcher`: requests the groups of later steps while earlier ones train; used by schedules with steps ahead.

`take` requests groups and returns the prompts of the step, `samples` what was generated for them. Everything that runs
at the same time runs on the hosts, as calls that were submitted, so the controller has no thread, queue or lock.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path

import numpy as np
import torch

from rlcore.config.schema import Config
from rlcore.controller.future import Future
from rlcore.controller.group import Group
from rlcore.controller.ref import BatchRef
from rlcore.data.batch import Batch
from rlcore.data.recorded import open_batch, save_batch
from rlcore.trainer.in_flight import RequestGroups
from rlcore.trainer.rewards_ahead import RewardsAhead
from rlcore.trainer.sharing import DeviceSharing
from rlcore.trainer.step import PromptSource, Step
from rlcore.trainer.window import PendingGroup, Window, num_before
from rlcore.types import Mean, Sampling

logger = logging.getLogger(__name__)
QUEUE = "queue"
"""Directory of the finished groups in a checkpoint."""
_NUM_BALANCED = 10
_MAX_WAITING = 0.4


class StepAbandoned(Exception):
    """A signal arrived while a step waited for samples, before any model changed."""


class RequestBatches:
    """Requests of whole batches, each a call of `generate`; new weights wait until they are finished.

    The calls and their split over the engines are those of a run without steps ahead. A host runs its calls in order,
    so batches finish in the order of their requests.
    """

    def __init__(self, rollout: Group, sampling: Sampling, samples_per_prompt: int) -> None:
        self._rollout, self._sampling, self._samples_per_prompt = rollout, sampling, samples_per_prompt
        self._calls: deque[Future[Batch]] = deque()

    def request(self, prompts: Batch, step: Step) -> None:
        """Start to generate the groups of these prompts; the costs are noted in the step."""
        generate = self._rollout.recording(step).generate
        self._calls.append(generate.submit(prompts, self._sampling, self._samples_per_prompt))

    def receive(self, interrupt: Callable[[], None], count: int) -> Sequence[Batch]:
        """Wait for the first batch and return its samples; `interrupt` is called while waiting, and may raise."""
        samples = self._calls[0].result(interrupt)
        self._calls.popleft()
        return [samples]

    def lost(self) -> Sequence[int]:
        """Return nothing: an engine that fails ends the run."""
        return ()

    def finished(self) -> Iterator[Batch]:
        """Yield the samples of groups that are finished, without waiting."""
        while self._calls and self._calls[0].done():
            samples = self._calls[0].result()
            self._calls.popleft()
            yield samples

    look = finished

    def before_weights(self) -> Iterator[Batch]:
        """Wait until new weights may arrive, and yield the samples of groups that finished meanwhile."""
        while self._calls:
            yield self._calls.popleft().result()

    def measure(self, step: Step, seconds: float) -> dict[str, float]:
        """Return the share of the step in which the engines generated nothing."""
        return {"schedule/engine_idle": max(0.0, 1.0 - step.busy_s.get("rollout.generate", 0.0) / seconds)}


class Prefetcher:
    """The training prompts in the order of a loader, with samples that are requested ahead of their step."""

    def __init__(
        self,
        source: PromptSource,
        groups: Mapping[str, Group],
        sampling: Sampling,
        config: Config,
        is_stopping: Callable[[], object],
        sharing: DeviceSharing | None = None,
    ) -> None:
        """Create a prefetcher with nothing requested.

        Args:
            is_stopping: whether to abandon a step that waits for samples.
            sharing: asked for the devices before each wait.
        """
        schedule, self._num_steps = config.schedule, config.trainer.steps
        self._source, self._is_stopping, self._sharing = source, is_stopping, sharing
        self._rollout, self._actor, self._engine = groups["rollout"], groups["actor"], config.rollout.name
        self._pools, self._per_prompt = config.pools, config.sampling.samples_per_prompt
        way = RequestGroups if schedule.in_flight_updates else RequestBatches
        self._requests = way(self._rollout, sampling, self._per_prompt)
        self._window = Window(
            per_step=config.trainer.prompts_per_step,
            steps_ahead=schedule.steps_ahead,
            max_staleness=schedule.max_staleness,
        )
        self._rewards, self._in_flight = RewardsAhead.of(groups), schedule.in_flight_updates
        self._open: dict[int, PendingGroup] = {}
        """Position -> group that is being generated."""
        self._taken: dict[int, PendingGroup] = {}
        """Position -> group of the step in progress."""
        self._generated: list[tuple[Batch, list[int]]] = []
        """Samples that `samples` returned in this step, and the positions of their groups."""
        self._unused: set[int] = set()
        """Positions of the step whose samples nobody has asked for."""
        self._balance: deque[tuple[float, float]] = deque(maxlen=_NUM_BALANCED)
        """Shares of the last steps in which the trainer and the engines waited."""
        self._warned: set[str] = set()

    def take(self, count: int, step: Step) -> Batch:
        """Request groups ahead, and return the prompts of `count` groups whose samples have arrived.

        Raises:
            StepAbandoned: the run is to stop, and samples of this step are missing.
            RuntimeError: a sample was not generated by one of the last `schedule.max_staleness` + 1 versions.
        """
        overdue: PendingGroup | None = None
        step.while_waiting = partial(self._look, step)
        with _waiting(step):
            self._request_again(step)
            self._request(count, step)
            while (chosen := self._window.choose(count, step.number)) is None:
                self._request_rewards(step)
                missing = count - self._window.num_finished
                if missing <= 0 and overdue is None:
                    overdue, since = self._window.first_open, time.perf_counter()
                if self._sharing is not None:
                    self._sharing.acquire(self._rollout.recording(step))
                for samples in self._requests.receive(self._check_stop, max(1, missing)):
                    self._arrive(samples)
                self._request_again(step)
        if overdue is not None:
            waited_s = time.perf_counter() - since
            step.note("schedule/waited_for_last_s", waited_s, 1.0)
            prompt_id = self._source.loader.at(overdue.position).prompt_id
            text = "step %d waited %.1f s for the responses to prompt %d, which are due in step %d"
            logger.info(text, step.number, waited_s, prompt_id, overdue.deadline_step)
        self._note_staleness(chosen, step)
        positions = [group.position for group in chosen]
        self._taken |= dict(zip(positions, chosen))
        self._unused.update(positions)
        step.positions += positions
        step.note("schedule/overtaken", num_before(chosen, self._window.pending))
        step.note("schedule/open", len(self._open))
        step.note("schedule/finished", len(self._window.pending) - len(self._open))
        return self._source.at(positions)

    def samples(self, prompts: Batch) -> Batch | None:
        """Return the samples of prompts that this step took, in their order; None for other or changed prompts."""
        positions = prompts.fetch("group_id").tolist()
        if not self._taken.keys() >= set(positions) or not _same(prompts, self._source.at(positions)):
            return None
        self._unused.difference_update(positions)
        samples = self._joined([self._taken[position] for position in positions])
        self._generated.append((samples, positions))
        return samples

    def scored(self, samples: Batch, step: Step, score: Callable[[Batch], Batch]) -> Batch:
        """Return the samples with their scores, which were requested ahead or are computed by `score`."""
        positions = next((its for batch, its in self._generated if batch is samples), None)
        if positions is None or self._rewards is None:
            return score(samples)
        return self._rewards.scored(positions, samples, step)

    def before_weights(self, step: Step) -> None:
        """Wait until the engines may receive the weights of this step, whose samples are no longer needed."""
        with _waiting(step):
            for samples in self._requests.before_weights():
                self._arrive(samples)
        if self._unused:
            self._warn_once(
                "unused",
                f"step {step.number}: responses to {len(self._unused)} prompts were generated ahead, but the algorithm did"
                " not call roles.generate with these prompts, unchanged; type  schedule=sync",
            )
        if self._rewards is not None and (unused := self._rewards.discard(self._taken)):
            self._rewards = None
            logger.warning(
                "step %d: the rewards of %d prompts were requested ahead, but the algorithm did not score the samples of"
                " roles.generate unchanged; from now on, rewards are computed in the step",
                *(step.number, unused),
            )
        self._taken, self._unused, self._generated = {}, set(), []
        self._request_rewards(step)

    def balance(self, step: Step, seconds: float) -> dict[str, float]:
        """Return what the engines did during the step; warn if one side waits too long."""
        measured = self._requests.measure(step, seconds)
        idle = measured["schedule/engine_idle"]
        self._balance.append((step.busy_s["wait for samples"] / seconds, idle))
        apart = self._rollout.pool != self._actor.pool and not self._rollout.runtime.inline
        if len(self._balance) == _NUM_BALANCED and apart:
            trainer, engines = (sum(shares) / _NUM_BALANCED for shares in zip(*self._balance))
            self._warn_of_waiting(trainer, "the trainer waited for samples", self._rollout.pool)
            self._warn_of_waiting(engines, "the engines had nothing to generate", self._actor.pool)
        return measured

    def save(self, directory: Path, step: int) -> None:
        """Write the finished groups that were requested up to this step, without the columns of the data.

        A resumed run requests the others again. Those that a later step requested, which did not reach its update, come
        from the weights of this checkpoint, so they are the same.
        """
        for samples in self._requests.finished():
            self._arrive(samples)
        last = step + self._window.max_staleness
        groups = [*self._taken.values(), *self._window.pending]
        groups = [it for it in groups if it.samples is not None and it.deadline_step <= last]
        if groups:
            samples = self._joined(groups)
            samples = samples.drop(*(name for name in self._source.columns if name in samples))
            deadlines = np.repeat([it.deadline_step for it in groups], self._per_prompt)
            save_batch(samples.with_rows(deadline_step=deadlines), directory / QUEUE)

    def load(self, directory: Path, step: int) -> None:
        """Read the groups that `save` wrote, for a run that continues with this step."""
        if not (directory / QUEUE).is_dir():
            return
        samples = open_batch(directory / QUEUE)
        positions = samples["group_id"][:: self._per_prompt].tolist()
        deadlines = samples["deadline_step"][:: self._per_prompt]
        first_versions = _first_versions(samples).view(-1, self._per_prompt).amin(1)
        deadlines = torch.minimum(deadlines, first_versions + 1 + self._window.max_staleness).tolist()
        data = self._source.at(positions).select(*self._source.columns).repeat(self._per_prompt)
        whole = BatchRef.publish(samples.drop("deadline_step").merge(data), self._rollout.runtime.store)
        self._window.put_back(
            PendingGroup(position=position, deadline_step=deadline, samples=whole, row=number * self._per_prompt)
            for number, (position, deadline) in enumerate(zip(positions, deadlines))
        )
        if self._window.is_in_time(self._window.pending, step):
            self._source.loader.keep(positions)
            return
        self._window.pending = []
        logger.warning(
            "%d groups of the checkpoint are staler than schedule.max_staleness=%d allows under these settings; they are"
            " generated again",
            *(len(positions), self._window.max_staleness),
        )

    def _request(self, count: int, step: Step) -> None:
        """Request the groups that are missing, in batches of at most one step."""
        missing = self._window.num_missing(count, self._num_steps - step.number)
        while missing > 0:
            prompts = self._source.issue(min(missing, self._window.per_step))
            groups = self._window.add(prompts["group_id"].tolist(), step.number)
            self._open |= {group.position: group for group in groups}
            self._requests.request(prompts, step)
            missing -= len(groups)

    def _request_again(self, step: Step) -> None:
        """Request the groups of engines that failed from the others, with the same seeds."""
        if positions := self._requests.lost():
            self._window.request_again(positions, step.number)
            self._requests.request(self._source.at(positions), step)

    def _arrive(self, samples: Batch) -> None:
        """Give the samples to their groups; those of a group are adjacent."""
        for row, position in enumerate(samples.fetch("group_id").tolist()):
            if row % self._per_prompt == 0:
                group = self._open.pop(position)
                group.samples, group.row = samples, row

    def _look(self, step: Step) -> None:
        """Request the rewards of groups that have arrived; called while the step waits for hosts."""
        try:
            for samples in self._requests.look():
                self._arrive(samples)
        except Exception:  # the next wait for samples raises it again
            return
        self._request_rewards(step)

    def _request_rewards(self, step: Step) -> None:
        """Request the rewards of groups that have arrived, unless a request is under way.

        If new weights wait for whole batches, so do rewards: those of all prompts of the next step are requested together,
        once this one takes no more of them. The rewards see the same batches as without steps ahead, in every run.
        """
        groups = self._window.pending
        is_early = not self._in_flight and (step.collecting or len(self._open) > 0)
        if self._rewards is None or is_early or not self._rewards.is_free():
            return
        if new := [it for it in groups if it.samples is not None and it.position not in self._rewards]:
            self._rewards.request([it.position for it in new], self._joined(new), step)

    def _check_stop(self) -> None:
        if self._is_stopping():
            raise StepAbandoned

    def _warn_of_waiting(self, share: float, what: str, pool: str) -> None:
        if share > _MAX_WAITING:
            size = self._pools[pool].devices_per_node
            self._warn_once(
                "waiting",
                f"{what} in {share:.0%} of the time of the last {_NUM_BALANCED} steps; use more devices in pool '{pool}':"
                f"  pools.{pool}.devices_per_node={2 * size}",
            )

    def _warn_once(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("%s", text)

    def _joined(self, groups: Sequence[PendingGroup]) -> Batch:
        """Return the samples of these groups in order."""
        parts = []
        for _, adjacent in groupby(groups, key=lambda group: id(group.samples)):
            run = list(adjacent)
            rows = [row for group in run for row in range(group.row, group.row + self._per_prompt)]
            samples = run[0].samples
            assert samples is not None, "a group that is not finished"
            parts.append(samples.take(rows))
        return parts[0].cat(parts)

    def _note_staleness(self, groups: Sequence[PendingGroup], step: Step) -> None:
        """Note the steps between the weights that the step updates and those that generated a token.

        Raises:
            RuntimeError: they are more than `schedule.max_staleness`, or negative.
        """
        samples, version, limit = self._joined(groups), step.number - 1, self._window.max_staleness
        first, last = version - _first_versions(samples), version - samples.fetch("policy_version")
        oldest = first.view(-1, self._per_prompt).amax(1)
        if (wrong := int(oldest.max())) > limit or (wrong := int(last.min())) < 0:
            raise RuntimeError(
                f"step {step.number} got a token that weights of version {version - wrong} generated, a staleness of"
                f" {wrong}; schedule.max_staleness={limit} allows versions {version - limit} to {version}\n"
                "The engine reports wrong versions, or did not load the weights that it was sent.\n"
                f"Test the engine:  rlcore check rollout {self._engine}"
            )
        before = step.metrics.get("schedule/staleness_max", Mean(0.0))
        step.metrics["schedule/staleness_max"] = Mean(max(before.value, float(oldest.max())))
        step.note("schedule/staleness_mean", float(oldest.sum()), len(oldest))
        for steps in range(limit + 1):
            step.note(f"schedule/staleness_share_{steps}", float((oldest == steps).sum()), len(oldest))
        step.note("schedule/last_token_staleness_mean", float(last.sum()), len(last))
        step.note("schedule/mixed", float((first != last).sum()), len(last))


def _first_versions(samples: Batch) -> torch.Tensor:
    """Return the version of the weights that generated the first token of each sample, [B] int64."""
    versions: torch.Tensor = samples.fetch("first_version")
    return versions


def _same(prompts: Batch, others: Batch) -> bool:
    """Return whether an engine would generate the same for both."""
    names = ("seed", "input_ids")
    same = set(prompts.columns) == set(others.columns)
    return same and all(torch.equal(*pair) for pair in zip(prompts.fetch(*names), others.fetch(*names)))


@contextmanager
def _waiting(step: Step) -> Iterator[None]:
    """Count the time of this block as waiting for samples, also that of calls which other steps have started."""
    start, blocked_s = time.perf_counter(), step.blocked_s
    try:
        yield
    finally:
        seconds = time.perf_counter() - start
        step.spent("wait for samples", seconds)
        step.blocked_s = blocked_s + seconds
