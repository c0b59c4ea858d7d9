"""`Stream`: the coroutines of a rollout worker that go on between its calls, all in one event loop.

On Ray the loop runs in a thread of the host, so that the engine draws while the controller does something else. With
runtime=local the loop runs only while a call waits, so the order of the engine's steps is the same in every run.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rlcore.errors import InfrastructureError

T = TypeVar("T")
R = TypeVar("R")
logger = logging.getLogger(__name__)
_LOOK_S = 1.0
_CLOSE_S = 3.0
"""Limit for the engine to finish a step, so that the host can be closed."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Counters of an engine since its worker was created."""

    rank: int
    """Rank of the engine."""
    num_tokens: int
    """Tokens generated; those of finished responses if the engine has no `CountsTokens`."""
    idle_s: float
    """Seconds without a requested group to draw, after the first one."""
    paused_s: float
    """Seconds that loading new weights took, and in which responses were set aside."""
    since_start_s: float
    """Seconds since the first group was requested."""

    @property
    def drawing_s(self) -> float:
        """Seconds with a group to draw, without pauses."""
        return self.since_start_s - self.idle_s - self.paused_s


class Stream(Generic[T]):
    """Coroutines that each draw one group, and calls that run beside them or between their steps."""

    def __init__(self, *, in_thread: bool) -> None:
        self.idle_s = self.paused_s = 0.0
        self._start: float | None = None
        self._in_thread = in_thread
        self._runner: asyncio.Runner | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._changed = threading.Condition()
        self._groups: list[Any] = []
        """Futures of groups that `finished` has not returned."""
        self._idle_since: float | None = None
        self._paused_since: float | None = None
        """Start of a pause that lasts until `resume`."""

    def begin(self, draw: Coroutine[Any, Any, T]) -> None:
        """Start to draw a group, and return at once."""
        runner = self._open(draw)
        if self._in_thread and self._thread is None:
            self._thread = threading.Thread(target=self._serve, args=(runner,), name="stream", daemon=True)
            self._thread.start()
        loop = runner.get_loop()
        group: Any = asyncio.run_coroutine_threadsafe(draw, loop) if self._thread else loop.create_task(draw)
        with self._changed:
            self._groups.append(group)
            self._start = self._start or time.monotonic()
            self.idle_s, self._idle_since = self._idle(), None
        group.add_done_callback(self._note)

    def finished(self, count: int, wait_s: float) -> list[T]:
        """Return the groups that have finished since the last call, in the order of `begin`.

        Args:
            count: wait for this number of groups, or for all if there are fewer.
            wait_s: limit of the wait in seconds. Without a thread, 0 draws nothing, and there is no other limit.

        Raises:
            Exception: the error of a coroutine, after which all others are cancelled.
        """
        if self._thread is not None:
            deadline = time.monotonic() + wait_s
            with self._changed:
                while not self._has(count) and (left_s := deadline - time.monotonic()) > 0:
                    self._changed.wait(min(left_s, _LOOK_S))
                    self._check_alive()
        elif self._groups and wait_s > 0:
            self.run(self._until(count))
        with self._changed:
            done = [group for group in self._groups if group.done()]
            self._groups = [group for group in self._groups if not group.done()]
        failed = [group for group in done if _has_failed(group)]
        if failed:
            self.cancel()
        self._rest()
        return [_result(group.result) for group in failed[:1] or done]

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Return the result of a coroutine that runs beside the groups."""
        runner = self._open(work)
        if self._thread is None:
            try:
                return _result(lambda: runner.run(work))
            finally:
                self._rest()
        running = asyncio.run_coroutine_threadsafe(work, runner.get_loop())
        while not concurrent.futures.wait([running], timeout=_LOOK_S).done:
            self._check_alive()
        return _result(running.result)

    def between_steps(self, function: Callable[[], R]) -> R:
        """Call a function while no coroutine is running."""
        if self._thread is None:
            return function()

        async def call() -> R:
            return function()

        return self.run(call())

    def pause(self, function: Callable[[], None], *, until_resume: bool = False) -> None:
        """Call a function between two steps and count its time; with `until_resume`, the time until then."""

        def timed() -> None:
            start = time.monotonic()
            try:
                function()
                if until_resume and self._paused_since is None:
                    self._paused_since = start
            finally:
                if self._paused_since is None:
                    self.paused_s += time.monotonic() - start

        self.between_steps(timed)

    def resume(self, function: Callable[[], None]) -> None:
        """Call a function between two steps, which ends a pause."""

        def resumed() -> None:
            paused_s = self._paused() - self.paused_s
            self.paused_s += paused_s
            self._idle_since = None if self._idle_since is None else self._idle_since + paused_s
            self._paused_since = None
            function()

        self.between_steps(resumed)

    def progress(self, rank: int, num_tokens: int) -> Progress:
        """Return the progress up to now."""
        with self._changed:
            since_start_s = time.monotonic() - self._start if self._start else 0.0
            return Progress(rank, num_tokens, self._idle(), self._paused(), since_start_s)

    def cancel(self) -> None:
        """Abort all groups and forget them."""
        with self._changed:
            for group in self._groups:
                group.cancel()
            self._groups = []

    def abort(self) -> None:
        """Cancel everything for good, from any thread; a call that waits raises InfrastructureError."""
        self._is_closed = True
        if (runner := self._runner) is not None:
            with contextlib.suppress(RuntimeError):  # the loop has just ended
                loop = runner.get_loop()
                for task in asyncio.all_tasks(loop):
                    loop.call_soon_threadsafe(task.cancel)

    def close(self) -> None:
        """Cancel everything and end the loop. May be called twice."""
        self.abort()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)
            if self._thread.is_alive():
                logger.warning("the engine is closed in the middle of a step, which took more than %g s", _CLOSE_S)
        elif self._runner is not None:
            self._runner.close()
        self._runner = None

    def _open(self, work: Coroutine[Any, Any, Any]) -> asyncio.Runner:
        if self._is_closed:
            work.close()
            raise _closed()
        self._runner = self._runner or asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._runner.get_loop()  # creates it, before the thread may do so
        return self._runner

    def _rest(self) -> None:
        """Close a loop without a thread that has nothing left to do."""
        if self._thread is None and self._runner is not None and not self._groups:
            self._runner.close()
            self._runner = None

    def _serve(self, runner: asyncio.Runner) -> None:
        with runner, contextlib.suppress(asyncio.CancelledError):
            runner.run(asyncio.Event().wait())  # until `abort`

    def _check_alive(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            raise _closed()

    async def _until(self, count: int) -> None:
        while not self._has(count):
            drawing = [group for group in self._groups if not group.done()]
            await asyncio.wait(drawing, return_when=asyncio.FIRST_COMPLETED)

    def _has(self, count: int) -> bool:
        done = [group for group in self._groups if group.done()]
        return len(done) >= min(count, len(self._groups)) or any(_has_failed(group) for group in done)

    def _note(self, group: object) -> None:
        _has_failed(group)  # reads the error; otherwise asyncio prints those of groups that nobody asks for
        with self._changed:
            if all(group.done() for group in self._groups):
                self._idle_since = time.monotonic()
            self._changed.notify_all()

    def _idle(self) -> float:
        end = time.monotonic() if self._paused_since is None else self._paused_since
        return self.idle_s + (0.0 if self._idle_since is None else max(0.0, end - self._idle_since))

    def _paused(self) -> float:
        return self.paused_s + (0.0 if self._paused_since is None else time.monotonic() - self._paused_since)


def _has_failed(group: Any) -> bool:
    return bool(group.cancelled() or group.exception() is not None)


def _result(result: Callable[[], R]) -> R:
    try:
        return result()
    except (asyncio.CancelledError, concurrent.futures.CancelledError):
        raise _closed() from None


def _closed() -> InfrastructureError:
    return InfrastructureError("the rollout worker was closed while it generated\nStart the run again.")
