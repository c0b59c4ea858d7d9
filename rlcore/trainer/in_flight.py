"""`RequestGroups`: requests of single groups to engines that receive new weights while they generate.

The engines generate between calls (rlcore/workers/stream.py), so a step costs each of them two calls: one that requests
groups and one that returns finished ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from rlcore.controller.future import Future
from rlcore.controller.group import Group
from rlcore.data.batch import Batch
from rlcore.errors import ConfigError, DeadlineExceeded
from rlcore.protocols.optional import UpdatesInFlight
from rlcore.trainer.step import Step
from rlcore.types import Sampling
from rlcore.workers.plan import ChosenPlugin
from rlcore.workers.stream import Progress

_POLL_S = 5.0
"""Limit of a poll; a checkpoint waits for the one under way."""


def check_engine(name: str, engine: ChosenPlugin) -> None:
    """Refuse an engine that cannot receive weights while it generates.

    Raises:
        ConfigError: it does not declare `in_flight_updates`, or not with these settings.
    """
    reason = "has no in_flight_updates, so it may not support weights that arrive while it generates"
    if isinstance(engine.resolved.object, UpdatesInFlight):
        if engine.resolved.object.in_flight_updates(engine.config):
            return
        size = getattr(engine.config, "tensor_parallel", 1)
        reason = f"cannot receive weights while it generates if rollout.tensor_parallel={size}, as its ranks work in lockstep"
    raise ConfigError(f"schedule.in_flight_updates=true: rollout '{name}' {reason}\nType  schedule=pipelined")


class RequestGroups:
    """Requests of single groups, each sent to the engine with the fewest open ones; weights do not wait for them."""

    def __init__(self, rollout: Group, sampling: Sampling, samples_per_prompt: int) -> None:
        self._rollout, self._sampling, self._samples_per_prompt = rollout, sampling, samples_per_prompt
        self._num_open = [0] * rollout.dp_size
        self._engine_of: dict[int, int] = {}
        """Position of an open group -> its engine."""
        self._poll: Future[tuple[Batch | None, list[Progress]]] | None = None
        self._has_failed = False
        self._progress: Sequence[Progress] = ()
        self._measured = (0.0, 0.0)

    def request(self, prompts: Batch, step: Step) -> None:
        """Start to generate the groups of these prompts; the costs are noted in the step."""
        engines = []
        for position in prompts.fetch("group_id").tolist():
            engine = self._num_open.index(min(self._num_open))
            self._num_open[engine] += 1
            self._engine_of[position] = engine
            engines.append(engine)
        request = self._rollout.recording(step).request_groups
        request(prompts.with_rows(engine=engines), self._sampling, self._samples_per_prompt)

    def receive(self, interrupt: Callable[[], None], count: int) -> Batch:
        """Wait for about this number of groups, or for one that a poll returns, and return their samples.

        Raises:
            DeadlineExceeded: no response has finished for `runtime.call_timeout_s`.
        """
        since = time.monotonic()
        while True:
            before = self._num_tokens
            samples = self._next(interrupt, -(-count // len(self._num_open)), _POLL_S)
            if samples is not None:
                return samples
            if self._num_tokens > before:
                since = time.monotonic()
            self._check_time(since)

    def finished(self) -> Iterator[Batch]:
        """Yield the samples of groups that are finished, without waiting for others; nothing after an engine has failed."""
        if self._has_failed:
            return
        if self._poll is not None and (samples := self._next(None, 0, 0.0)) is not None:
            yield samples
        if (samples := self._next(None, 0, 0.0)) is not None:
            yield samples

    def before_weights(self) -> Iterator[Batch]:
        """Yield nothing: new weights do not wait."""
        return iter(())

    def measure(self, step: Step, seconds: float) -> dict[str, float]:
        """Return the shares of the time since the last call in which engines had no group, or loaded weights."""
        idle, paused = (sum(getattr(it, name) for it in self._progress) for name in ("idle_s", "paused_s"))
        before, self._measured = self._measured, (idle, paused)
        whole = seconds * len(self._num_open)
        return {
            "schedule/engine_idle": (idle - before[0]) / whole,
            "schedule/engine_paused": (paused - before[1]) / whole,
        }

    @property
    def _num_tokens(self) -> int:
        return sum(it.num_tokens for it in self._progress)

    def _next(self, interrupt: Callable[[], None] | None, count: int, wait_s: float) -> Batch | None:
        """Return the result of the poll under way, or of a new one."""
        self._poll = self._poll or self._rollout.finished_groups.submit(count, wait_s)
        try:
            samples, self._progress = self._poll.result(interrupt)
        except Exception:
            self._has_failed = self._poll.done()  # otherwise `interrupt` has raised
            raise
        self._poll = None
        if samples is not None:
            for position in samples.fetch("group_id").tolist()[:: self._samples_per_prompt]:
                self._num_open[self._engine_of.pop(position)] -= 1
        return samples

    def _check_time(self, since: float) -> None:
        runtime, pool = self._rollout.runtime, self._rollout.pool
        timeout_s = runtime.config.call_timeout_s
        if time.monotonic() - since < timeout_s:
            return
        handles = [runtime.submit(pool, rank, "stack") for rank in range(len(self._rollout.meshes))]
        stacks = [
            f"stack of rank {rank} of pool '{pool}':\n{stack}"
            for rank, stack in enumerate(runtime.wait(handles, "stack", timeout_s))
        ]
        raise DeadlineExceeded(
            "\n".join(
                [
                    f"the engines finished none of {len(self._engine_of)} groups, and no response, within {timeout_s:g} s;",
                    *stacks,
                    f"Wait longer:  runtime.call_timeout_s={2 * timeout_s:g}",
                ]
            )
        )
