"""`RequestGroups`: requests of single groups to engines that receive new weights while they generate.

The engines generate between calls (rlcore/workers/stream.py), so a step costs each of them two calls: one that requests
groups and one that returns finished ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rlcore.controller.future import Future
from rlcore.controller.group import Group
from rlcore.data.batch import Batch
from rlcore.errors import ConfigError, DeadlineExceeded, InfrastructureError
from rlcore.protocols.optional import Pauses, UpdatesInFlight
from rlcore.trainer.step import Step
from rlcore.types import Sampling
from rlcore.workers.plan import ChosenPlugin
from rlcore.workers.stream import Progress

_POLL_S = 5.0
"""Limit of a poll; a checkpoint waits for the one under way."""


def check_engine(name: str, engine: ChosenPlugin, paused_for: Sequence[str]) -> None:
    """Refuse an engine that cannot receive weights while it generates, or stop for models in its pool.

    Args:
        paused_for: roles for which it has to stop.

    Raises:
        ConfigError: it does not declare `in_flight_updates`, not with these settings, or has no `pause`.
    """
    reason, advice = (
        "has no in_flight_updates, so it may not support weights that arrive while it generates",
        "schedule=sync" if paused_for else "schedule=pipelined",
    )
    if isinstance(engine.resolved.object, UpdatesInFlight):
        if engine.resolved.object.in_flight_updates(engine.config):
            if not paused_for or isinstance(engine.resolved.object, Pauses):
                return
            raise ConfigError(
                f"rollout '{name}' has no pause and resume, so it cannot set responses aside while role"
                f" '{paused_for[0]}' needs the devices of its pool\nType  placement=split   or  schedule=sync"
            )
        size = getattr(engine.config, "tensor_parallel", 1)
        reason = f"cannot receive weights while it generates if rollout.tensor_parallel={size}, as its ranks work in lockstep"
    raise ConfigError(f"schedule.in_flight_updates=true: rollout '{name}' {reason}\nType  {advice}")


class RequestGroups:
    """Requests of single groups, each sent to the engine with the fewest open ones; weights do not wait for them."""

    def __init__(self, rollout: Group, sampling: Sampling, samples_per_prompt: int) -> None:
        self._rollout, self._sampling, self._samples_per_prompt = rollout, sampling, samples_per_prompt
        self._open: dict[int, set[int]] = {rank: set() for rank in rollout.ranks}
        """Rank of an engine -> positions of its open groups."""
        self._num_again = 0
        self._poll: Future[tuple[Batch | None, list[Progress]]] | None = None
        self._failure: Exception | None = None
        """Error of the last poll, which every later one raises."""
        self._progress: dict[int, Progress] = {}
        """Rank of an engine -> its progress at the last poll."""
        self._advanced: dict[int, Progress] = {}
        """Rank of an engine -> its progress at the last poll that found no open group, or new tokens."""
        self._measured = (0.0, 0.0, 0.0)

    def request(self, prompts: Batch, step: Step) -> None:
        """Start to generate the groups of these prompts; the costs are noted in the step."""
        engines, ranks = [], self._rollout.ranks
        for position in prompts.fetch("group_id").tolist():
            rank = min(ranks, key=lambda rank: len(self._open[rank]))
            self._open[rank].add(position)
            engines.append(ranks.index(rank))
        request = self._rollout.recording(step).request_groups
        request(prompts.with_rows(engine=engines), self._sampling, self._samples_per_prompt)

    def receive(self, interrupt: Callable[[], None], count: int) -> Sequence[Batch]:
        """Wait for about this number of groups, or for one that a poll returns, and return their samples.

        Returns nothing if an engine has failed: `lost` has its groups.

        Raises:
            InfrastructureError: an engine failed and cannot be left out. It ended, raised this error, or had open groups
                and made no progress for `runtime.call_timeout_s`.
        """
        while self._open.keys() == set(self._rollout.ranks):
            samples = self._next(interrupt, -(-count // len(self._open)), _POLL_S)
            if samples is not None:
                return [samples]
            self._leave_out_stuck()
        return []

    def lost(self) -> Sequence[int]:
        """Return the positions of the open groups of engines that have failed, each once."""
        failed = self._open.keys() - set(self._rollout.ranks)
        positions = sorted(position for rank in failed for position in self._open.pop(rank))
        self._num_again += len(positions)
        return positions

    def finished(self) -> Iterator[Batch]:
        """Yield the samples of groups that are finished, without waiting for others; nothing after an engine has failed."""
        if self._failure is not None:
            return
        if self._poll is not None and (samples := self._next(None, 0, 0.0)) is not None:
            yield samples
        if (samples := self._next(None, 0, 0.0)) is not None:
            yield samples

    def look(self) -> Iterator[Batch]:
        """Yield the samples of groups that the last look has found, and look again, without waiting."""
        if self._poll is not None and self._poll.done() and (samples := self._next(None, 0, 0.0)) is not None:
            yield samples
        self._poll = self._poll or self._rollout.finished_groups.submit(0, 0.0)

    def before_weights(self) -> Iterator[Batch]:
        """Yield nothing: new weights do not wait."""
        return iter(())

    def measure(self, step: Step, seconds: float) -> dict[str, float]:
        """Return the shares of the time between the last polls of two steps in which engines had no group, or paused, and
        the number of groups that were requested again."""
        idle_s, paused_s, since_start_s = (
            sum(getattr(it, name) for it in self._progress.values()) for name in ("idle_s", "paused_s", "since_start_s")
        )
        before, self._measured = self._measured, (idle_s, paused_s, since_start_s)
        whole = since_start_s - before[2] or 1.0  # nothing was polled in a step that found its groups finished
        again, self._num_again = self._num_again, 0
        return {
            "schedule/engine_idle": (idle_s - before[0]) / whole,
            "schedule/engine_paused": (paused_s - before[1]) / whole,
            "schedule/requested_again": float(again),
        }

    def _next(self, interrupt: Callable[[], None] | None, count: int, wait_s: float) -> Batch | None:
        """Return the result of the poll under way, or of a new one."""
        if self._failure is not None:
            raise self._failure
        self._poll = self._poll or self._rollout.finished_groups.submit(count, wait_s)
        try:
            samples, progress = self._poll.result(interrupt)
        except Exception as error:
            self._failure = error if self._poll.done() else None  # otherwise `interrupt` has raised
            raise
        self._poll = None
        for it in progress:
            before = self._progress.get(it.rank)
            if before is None or it.num_tokens != before.num_tokens or not self._open[it.rank]:
                self._advanced[it.rank] = it
            self._progress[it.rank] = it
        if samples is not None:
            arrived = set(samples.fetch("group_id").tolist())
            for positions in self._open.values():
                positions -= arrived
        return samples

    def _leave_out_stuck(self) -> None:
        runtime, pool = self._rollout.runtime, self._rollout.pool
        timeout_s = runtime.config.call_timeout_s
        for rank in [rank for rank in self._rollout.ranks if self._stuck_s(rank) >= timeout_s]:
            text = (
                f"engine {rank} of pool '{pool}' finished none of {len(self._open[rank])} groups, and no response, within"
                f" {timeout_s:g} s;\nstack of rank {rank} of pool '{pool}':\n{self._stack(rank)}"
            )
            error = DeadlineExceeded(f"{text}\nWait longer:  runtime.call_timeout_s={2 * timeout_s:g}")
            self._rollout.members.leave_out(rank, error)

    def _stuck_s(self, rank: int) -> float:
        """Return the seconds, by the clock of the engine, in which it generated and made no progress."""
        return self._progress[rank].drawing_s - self._advanced[rank].drawing_s

    def _stack(self, rank: int) -> str:
        runtime = self._rollout.runtime
        try:
            return str(runtime.wait([runtime.submit(self._rollout.pool, rank, "stack")], "stack", _POLL_S)[0])
        except InfrastructureError as error:
            return f"(no stack: {type(error).__name__})"
