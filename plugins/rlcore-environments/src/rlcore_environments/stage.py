"""A thread with an event loop for environments, so that they delay neither the engine nor one another.

A call that awaits too long is cancelled at its deadline, and abandoned if it ignores the cancellation. A call
that blocks without awaiting cannot be stopped: its thread is abandoned, and a new thread runs the calls that
had not started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType
from typing import Any

from rlcore.errors import InfrastructureError

_POLL_S = 0.1
_MAX_BLOCKED = 8
"""Number of abandoned threads after which the step fails."""
_STOP_S = 2.0
"""Time for running calls to finish when their thread stops."""
_GRACE_S = 5.0
"""Time for a cancelled call to finish, but no more than the timeout of the call."""


class TooManyBlocked(InfrastructureError):
    """Error for environments that block too many threads in one step."""


class Stage:
    """Async context manager that runs calls in a separate thread; use it from a single event loop."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._num_blocked = 0
        self._where = ""
        self._thread = _Thread()
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Stage:
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._watcher is not None, "exited before it was entered"
        self._watcher.cancel()
        self._thread.stop()

    def forgive(self) -> None:
        """Count blocked threads from zero again."""
        self._num_blocked = 0

    async def call(self, make: Callable[[], Awaitable[Any]]) -> Any:
        """Await `make()` in the thread, and return its result or raise its error.

        Raises:
            TimeoutError: no result in time, or another call blocked the thread.
            TooManyBlocked: too many calls have blocked their threads.
        """
        while True:
            if self._num_blocked >= _MAX_BLOCKED:
                raise TooManyBlocked(
                    f"environments blocked {_MAX_BLOCKED} threads in one step, the last at {self._where}\n"
                    "Await slow operations (asyncio.to_thread, asyncio.create_subprocess_exec) instead of blocking."
                )
            thread, call = self._thread, _Call(make, self._timeout_s)
            thread.loop.call_soon_threadsafe(call.begin)
            try:
                await asyncio.wait({call.answer, thread.blocked}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not call.answer.done():
                    thread.loop.call_soon_threadsafe(call.end)
            if call.answer.done():
                return call.answer.result()
            if call.begun:
                own = f"it blocks at {thread.where} instead of awaiting" if call.task is thread.culprit else ""
                raise TimeoutError(own or f"its thread was blocked by another episode at {thread.where}")

    async def _watch(self) -> None:
        """Replace a thread whose event loop has been blocked for longer than the timeout of a call."""
        seen, quiet_s = -1, 0.0
        while True:
            await asyncio.sleep(_POLL_S)
            ticks = self._thread.num_ticks
            quiet_s = quiet_s + _POLL_S if ticks == seen else 0.0
            seen = ticks
            if quiet_s > self._timeout_s:
                blocked, self._thread, self._num_blocked = self._thread, _Thread(), self._num_blocked + 1
                self._where = blocked.abandon()
                seen, quiet_s = -1, 0.0


class _Call:
    """One call. It reports its own result, because the thread's loop may be blocked by then."""

    def __init__(self, make: Callable[[], Awaitable[Any]], timeout_s: float) -> None:
        self._make, self._timeout_s = make, timeout_s
        self._home = asyncio.get_running_loop()
        self.answer: asyncio.Future[Any] = self._home.create_future()
        """Result, as a future of the caller's loop."""
        self.task: asyncio.Task[None] | None = None
        self.begun = False
        self._is_over = False

    def begin(self) -> None:
        """Start the call in the running loop, unless it was ended before."""
        if not self._is_over:
            self.task = asyncio.get_running_loop().create_task(self._run())

    def end(self) -> None:
        """Cancel the call, whose result is no longer needed."""
        self._is_over = True
        if self.task is not None:
            self.task.cancel()

    async def _run(self) -> None:
        self.begun = True
        limit = asyncio.timeout(self._timeout_s)
        most_s = self._timeout_s + min(self._timeout_s, _GRACE_S)
        ignored = TimeoutError("it ignored its cancellation; let asyncio.CancelledError propagate")
        abandoned = asyncio.get_running_loop().call_later(most_s, self._report, None, ignored)
        value, failed = None, None
        try:
            async with limit:
                value = await self._make()
        except BaseException as error:  # even SystemExit must end only this call's episode
            if isinstance(error, asyncio.CancelledError) and self.task is not None and self.task.cancelling():
                raise
            late = limit.expired() and isinstance(error, TimeoutError)
            cause = TimeoutError(f"no answer within {self._timeout_s:g} s") if late else error
            failed = cause if isinstance(cause, Exception) else RuntimeError(f"{type(cause).__name__}: {cause}")
        finally:
            abandoned.cancel()
        self._report(value, failed)

    def _report(self, value: Any, failed: Exception | None) -> None:
        with contextlib.suppress(RuntimeError):  # an abandoned thread may outlive the caller's loop
            self._home.call_soon_threadsafe(self._settle, value, failed)

    def _settle(self, value: Any, failed: Exception | None) -> None:
        if self.answer.done():
            return
        if failed is None:
            self.answer.set_result(value)
        else:
            self.answer.set_exception(failed)


class _Thread:
    """Daemon thread with an event loop, and a counter that stops when the loop is blocked."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.num_ticks = 0
        self.blocked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Future of the caller's loop, done when this thread is abandoned."""
        self.where = ""
        """File and line that blocks the thread."""
        self.culprit: asyncio.Task[Any] | None = None
        self._thread = threading.Thread(target=self._run, name="rlcore-environments", daemon=True)
        self._thread.start()

    def abandon(self) -> str:
        """Mark the thread as blocked, and return the file and line that blocks it."""
        self.culprit = asyncio.current_task(self.loop)
        frame = sys._current_frames().get(self._thread.ident or 0)
        while frame is not None and frame.f_code.co_filename.startswith(os.path.dirname(asyncio.__file__)):
            frame = frame.f_back
        self.where = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" if frame else "an unknown place"
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.blocked.set_result(None)
        return self.where

    def stop(self) -> None:
        """Stop the thread; cancel its running calls and wait for them briefly."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=_STOP_S + 1.0)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.create_task(self._tick())
        self.loop.run_forever()
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        self.loop.run_until_complete(_ended(left))
        self.loop.close()

    async def _tick(self) -> None:
        while True:
            self.num_ticks += 1
            await asyncio.sleep(_POLL_S / 2)


async def _ended(tasks: Iterable[asyncio.Task[Any]]) -> None:
    await asyncio.wait([asyncio.gather(*tasks, return_exceptions=True)], timeout=_STOP_S)
