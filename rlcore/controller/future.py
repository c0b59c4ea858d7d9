"""`Future`: the result of a group call that may still be running."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeAlias, TypeVar

R = TypeVar("R")
Interrupt: TypeAlias = "Callable[[], None] | None"


class Future(Generic[R]):
    """The result of a group call; `result` may be called many times."""

    def __init__(self, wait: Callable[[Interrupt], R], is_done: Callable[[], bool] = lambda: True) -> None:
        self._wait: Callable[[Interrupt], R] | None = wait
        self._is_done = is_done
        self._value: R

    @classmethod
    def of(cls, value: R) -> Future[R]:
        """Return a finished future."""
        return cls(lambda _: value)

    def done(self) -> bool:
        """Return whether `result` would not wait."""
        return self._wait is None or self._is_done()

    def result(self, interrupt: Interrupt = None) -> R:
        """Wait for the result, at most until the call's deadline.

        Args:
            interrupt: called about once per second while waiting; an exception that it raises ends the wait, but not the
                call.

        Raises:
            DeadlineExceeded: the call's deadline passed.
            Exception: any error that the call itself raised.
        """
        if self._wait is not None:
            self._value = self._wait(interrupt)
            self._wait = None
        return self._value
