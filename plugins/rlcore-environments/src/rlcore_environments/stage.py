"""A thread with an event loop for the code of environments, so that it never holds the engine, and one never holds all.

A call that awaits too long ends at its deadline; one that goes on when it is cancelled is no longer waited for. One that
blocks without awaiting cannot be ended: its thread is left behind, and a new one takes over what had not begun.
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

_LOOK_S = 0.1
_MAX_BLOCKED = 8
"""Threads that are left behind before a step is given up."""
_END_S = 2.0
"""For what still runs when a thread ends."""
_GRACE_S = 5.0
"""For what a cancelled call still does, at most; of a call with a shorter time-out as long as that."""


class TooManyBlocked(InfrastructureError):
    """Environments block thread after thread."""


class Stage:
    """Use it with `async with`; calls come from that event loop."""

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
        assert self._watcher is not None, "left before it was entered"
        self._watcher.cancel()
        self._thread.stop()

    async def call(self, make: Callable[[], Awaitable[Any]]) -> Any:
        """Await `make()` there; what it raises is raised here.

        Raises:
            TimeoutError: no answer in time, or its thread was blocked by another call.
            TooManyBlocked: too many calls have blocked their threads.
        """
        while True:
            if self._num_blocked >= _MAX_BLOCKED:
                raise TooManyBlocked(
                    f"environments blocked {_MAX_BLOCKED} threads in one step, the last at {self._where}\n"
                    "Await what is slow (asyncio.to_thread, asyncio.create_subprocess_exec) instead of blocking."
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
        """Replace a thread whose loop has not turned for the time of a whole step."""
        seen, quiet_s = -1, 0.0
        while True:
            await asyncio.sleep(_LOOK_S)
            turns = self._thread.turns
            quiet_s = quiet_s + _LOOK_S if turns == seen else 0.0
            seen = turns
            if quiet_s > self._timeout_s:
                blocked, self._thread, self._num_blocked = self._thread, _Thread(), self._num_blocked + 1
                self._where = blocked.give_up()
                seen, quiet_s = -1, 0.0


class _Call:
    """One call. It tells its answer itself: its loop may be blocked by then."""

    def __init__(self, make: Callable[[], Awaitable[Any]], timeout_s: float) -> None:
        self._make, self._timeout_s = make, timeout_s
        self._home = asyncio.get_running_loop()
        self.answer: asyncio.Future[Any] = self._home.create_future()
        """Of the caller's loop."""
        self.task: asyncio.Task[None] | None = None
        self.begun = False
        self._is_over = False

    def begin(self) -> None:
        """Run it in this loop."""
        if not self._is_over:
            self.task = asyncio.get_running_loop().create_task(self._run())

    def end(self) -> None:
        """Nobody waits for it any more."""
        self._is_over = True
        if self.task is not None:
            self.task.cancel()

    async def _run(self) -> None:
        self.begun = True
        limit = asyncio.timeout(self._timeout_s)
        most_s = self._timeout_s + min(self._timeout_s, _GRACE_S)
        ignored = TimeoutError("it does not end when it is cancelled: let asyncio.CancelledError through")
        given_up = asyncio.get_running_loop().call_later(most_s, self._tell, None, ignored)
        value, failed = None, None
        try:
            async with limit:
                value = await self._make()
        except BaseException as error:  # SystemExit, too: it is one episode that ends
            if isinstance(error, asyncio.CancelledError) and self.task is not None and self.task.cancelling():
                raise
            late = limit.expired() and isinstance(error, TimeoutError)
            told = TimeoutError(f"no answer within {self._timeout_s:g} s") if late else error
            failed = told if isinstance(told, Exception) else RuntimeError(f"{type(told).__name__}: {told}")
        finally:
            given_up.cancel()
        self._tell(value, failed)

    def _tell(self, value: Any, failed: Exception | None) -> None:
        with contextlib.suppress(RuntimeError):  # a thread that was left behind may outlive the caller's loop
            self._home.call_soon_threadsafe(self._settle, value, failed)

    def _settle(self, value: Any, failed: Exception | None) -> None:
        if self.answer.done():
            return
        if failed is None:
            self.answer.set_result(value)
        else:
            self.answer.set_exception(failed)


class _Thread:
    """A daemon thread with an event loop that counts its turns."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.turns = 0
        self.blocked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Of the caller's loop; done when this thread is given up."""
        self.where = ""
        """File and line that blocked it."""
        self.culprit: asyncio.Task[Any] | None = None
        self._thread = threading.Thread(target=self._run, name="rlcore-environments", daemon=True)
        self._thread.start()

    def give_up(self) -> str:
        """Say that it is blocked; returns where."""
        self.culprit = asyncio.current_task(self.loop)
        frame = sys._current_frames().get(self._thread.ident or 0)
        while frame is not None and frame.f_code.co_filename.startswith(os.path.dirname(asyncio.__file__)):
            frame = frame.f_back
        self.where = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" if frame else "an unknown place"
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.blocked.set_result(None)
        return self.where

    def stop(self) -> None:
        """End the thread; what still runs in it is cancelled, and not waited for long."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=_END_S + 1.0)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.create_task(self._turn())
        self.loop.run_forever()
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        self.loop.run_until_complete(_ended(left))
        self.loop.close()

    async def _turn(self) -> None:
        while True:
            self.turns += 1
            await asyncio.sleep(_LOOK_S / 2)


async def _ended(tasks: Iterable[asyncio.Task[Any]]) -> None:
    await asyncio.wait([asyncio.gather(*tasks, return_exceptions=True)], timeout=_END_S)
