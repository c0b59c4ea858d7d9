"""Run rewards in separate processes with a timeout for each sample. Called by the reward worker, once per step.

A child gets a chunk of samples and answers sample by sample. If it is silent for `timeout_s` or dies, the current
sample gets the outcome "timeout" or "error", its process group is killed, and a new child scores the rest.

Children are started with `python -c` instead of multiprocessing, which would import the parent's main module (Ray's
worker, a test runner) into each. They ignore Ctrl-C, and the kernel ends them when the parent ends.
"""

from __future__ import annotations

import json
import logging
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from rlcore.errors import ConfigError, DeadlineExceeded, InfrastructureError
from rlcore.protocols.reward import RewardSpec
from rlcore.rewards.output import Output
from rlcore.rewards.pipeline import Outcome, RewardPart, combine, timed_out
from rlcore.rewards.runner import Emit, Job, RewardRunner
from rlcore.rewards.signature import Row

logger = logging.getLogger(__name__)

_BOOT = "import sys, json; sys.path[:] = json.loads(sys.argv[3]); from rlcore.rewards.runner import serve; serve(int(sys.argv[1]), int(sys.argv[2]))"
_MAX_CHUNK = 64
_GRACE_S = 1.0
"""A child cancels its own coroutines at `timeout_s`; it is killed only if it is silent for this much longer."""


class RewardExecutor:
    """Scores samples with a list of rewards. Loading errors are raised on construction, before any sample.

    Example: with RewardExecutor([RewardSpec("short", "my_rewards:short")]) as rewards: rewards.score(samples)
    """

    def __init__(
        self,
        specs: Sequence[RewardSpec],
        *,
        num_processes: int = 1,
        timeout_s: float = 10.0,
        start_timeout_s: float = 120.0,
    ) -> None:
        """Start the children; `num_processes=0` scores in this process, which suits a debugger but has no timeout."""
        _check_names(specs)
        self._weights = {spec.name: spec.weight for spec in specs}
        self._inline = RewardRunner(specs, None) if num_processes == 0 else None
        self._children: list[_Child] = []
        self._output = Output()
        self._close = weakref.finalize(self, _close_all, self._children, self._inline, self._output)
        try:
            for _ in range(num_processes):
                self._children.append(_Child(specs, timeout_s, start_timeout_s, self._output.fd))
            while starting := [child for child in self._children if not child.ready]:
                self._turn(starting, lambda reward, sample, part: None)
        except BaseException:
            self.close()
            raise

    def score(self, samples: Sequence[Mapping[str, object]]) -> list[Outcome]:
        """Return one outcome per sample, in order. A sample has the columns of its dataset and SAMPLE_FIELDS."""
        if not self._close.alive:
            raise _closed()
        parts: list[list[RewardPart]] = [[RewardPart("skip")] * len(self._weights) for _ in samples]

        def store(reward: int, sample: int, part: RewardPart) -> None:
            parts[sample][reward] = part

        try:
            self._run(samples, store)
        except BaseException:
            # Answers to this call may still arrive; they must not be mistaken for those of the next call.
            self.close()
            raise
        return [combine(self._weights, said, sample) for said, sample in zip(parts, samples, strict=True)]

    def close(self) -> None:
        """End the children. May be called twice; also called when the executor is garbage-collected."""
        self._close()

    def __enter__(self) -> RewardExecutor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, samples: Sequence[Row], emit: Emit) -> None:
        every = range(len(samples))
        rewards = range(len(self._weights))
        if self._inline:
            self._inline.run(dict(enumerate(samples)), [(reward, list(every)) for reward in rewards], emit)
            return
        size = min(_MAX_CHUNK, -(-len(samples) // (4 * len(self._children))) or 1)
        queue = deque([(reward, list(every[at : at + size])) for reward in rewards] for at in every[::size])
        while queue or any(child.jobs for child in self._children):
            for child in [child for child in self._children if child.ready and not child.jobs]:
                if child.died():
                    self._replace(child)
                elif queue:
                    child.give(samples, queue.popleft())
            queue.extendleft(self._turn([child for child in self._children if child.jobs or not child.ready], emit))

    def _replace(self, child: _Child) -> None:
        child.kill()
        if not self._close.alive:
            raise _closed()
        self._children[self._children.index(child)] = child.successor()

    def _turn(self, busy: Sequence[_Child], emit: Emit) -> list[list[Job]]:
        """Wait for the first answer or deadline among `busy` children; return the jobs to assign again."""
        wait_s = min(child.deadline for child in busy) - time.monotonic()
        answering = multiprocessing.connection.wait([child.connection for child in busy], timeout=max(0.0, wait_s))
        returned = []
        for child in busy:
            alive = child.receive(emit) if child.connection in answering else time.monotonic() < child.deadline
            if not alive:
                returned.append(child.give_up(emit))
                self._replace(child)
        return [jobs for jobs in returned if jobs]


class _Child:
    """The parent's side of one child process: its open jobs and its deadline."""

    def __init__(self, specs: Sequence[RewardSpec], timeout_s: float, start_timeout_s: float, output_fd: int) -> None:
        self._settings = (specs, timeout_s, start_timeout_s, output_fd)
        self.ready = False
        self.jobs: list[Job] = []
        self.concurrent: list[bool] = []
        self.deadline = time.monotonic() + start_timeout_s
        self.connection, theirs = multiprocessing.Pipe()
        their_lifeline, self._lifeline = os.pipe()
        fds = (theirs.fileno(), their_lifeline)
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-c", _BOOT, *map(str, fds), json.dumps([str(path) for path in sys.path])],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            stdout=output_fd,
            stderr=output_fd,
            start_new_session=True,
        )
        theirs.close()
        os.close(their_lifeline)
        self.connection.send(([replace(spec, options=dict(spec.options)) for spec in specs], timeout_s))

    def successor(self) -> _Child:
        return _Child(*self._settings)

    def died(self) -> bool:
        return self._process.poll() is not None

    def give(self, samples: Sequence[Row], jobs: list[Job]) -> None:
        """Send a chunk to the idle child."""
        self.jobs = jobs
        wanted = {sample for _, chosen in jobs for sample in chosen}
        try:
            self.connection.send(({sample: dict(samples[sample]) for sample in wanted}, jobs))
        except OSError:
            logger.debug("reward process %d died before its chunk; the next wait sees it", self._process.pid)
        self._extend_deadline()

    def receive(self, emit: Emit) -> bool:
        """Process all available results; return False if the child has died."""
        try:
            while True:
                self._take(self.connection.recv(), emit)
                if not self.jobs or not self.connection.poll():
                    return True
        except (EOFError, OSError):
            self._await_exit()
            return False
        finally:
            self._extend_deadline()

    def _await_exit(self) -> None:
        """Wait briefly for an ending process, to get its exit code."""
        try:
            self._process.wait(timeout=_GRACE_S)
        except subprocess.TimeoutExpired:
            logger.debug("reward process %d closed its connection but is still running", self._process.pid)

    def _take(self, message: Any, emit: Emit) -> None:
        if isinstance(message, Exception):
            raise message
        if not self.ready:
            self.ready, self.concurrent = True, message
            return
        reward, sample, part = message
        emit(reward, sample, part)
        expected, samples = self.jobs[0]
        assert expected == reward, f"child answered for reward {reward}, expected {expected}"
        samples.remove(sample)
        if not samples:
            self.jobs.pop(0)

    def _extend_deadline(self) -> None:
        if self.ready and self.jobs:
            grace_s = _GRACE_S if self.concurrent[self.jobs[0][0]] else 0.0
            self.deadline = time.monotonic() + self._settings[1] + grace_s

    def give_up(self, emit: Emit) -> list[Job]:
        """End a child that is silent or dead; report its current sample as failed and return the remaining jobs.

        With several samples in progress the culprit is unknown, so each of them is scored again alone."""
        silent = not self.died() and time.monotonic() >= self.deadline
        self.kill()
        if not self.ready:
            raise self._start_error(silent)
        reward, samples = self.jobs[0]
        if self.concurrent[reward] and len(samples) > 1:
            return [*((reward, [sample]) for sample in samples), *self.jobs[1:]]
        died = f"its process died ({_exit(self._process.returncode)})"
        emit(reward, samples[0], timed_out(self._settings[1]) if silent else RewardPart("error", message=died))
        rest = [(reward, samples[1:])] if samples[1:] else []
        return [*rest, *self.jobs[1:]]

    def _start_error(self, silent: bool) -> InfrastructureError:
        names = ", ".join(spec.name for spec in self._settings[0])
        if silent:
            return DeadlineExceeded(
                f"rewards {names}: not loaded within {self._settings[2]:g} s\nImport them by hand to see where they hang."
            )
        return InfrastructureError(
            f"rewards {names}: the process died while loading them ({_exit(self._process.returncode)})\n"
            "Its output is above."
        )

    def kill(self) -> None:
        """End the child and all processes that it started. May be called twice."""
        if self.connection.closed:
            return
        self.connection.close()
        os.close(self._lifeline)
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            logger.debug("reward process %d had already ended", self._process.pid)
        self._process.wait(timeout=30)


def _closed() -> InfrastructureError:
    return InfrastructureError("the reward executor is closed\nCreate a new one.")


def _exit(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def _close_all(children: list[_Child], inline: RewardRunner | None, output: Output) -> None:
    for child in children:
        child.kill()
    if inline:
        inline.close()
    output.close()


def _check_names(specs: Sequence[RewardSpec]) -> None:
    names = [spec.name for spec in specs]
    if not names:
        raise ConfigError("the list of rewards is empty\nType reward=exact_match, or the name of another reward.")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"two rewards have the name {twice!r}\nGive them different names.")
