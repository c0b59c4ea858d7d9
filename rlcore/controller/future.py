"""`Future`: the result of a group call that may still be running."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

R = TypeVar("R")


class Future(Generic[R]):
    """The result of a group call; `result` may be called many times."""

    def __init__(self, wait: Callable[[], R]) -> None:
        self._wait: Callable[[], R] | None = wait
        self._value: R

    @classmethod
    def of(cls, value: R) -> Future[R]:
        """Return a finished future."""
        return cls(lambda: value)

    def result(self) -> R:
        """Wait for the result, at most until the call's deadline.

        Raises:
            DeadlineExceeded: the call's deadline passed.
            Exception: any error that the call itself raised.
        """
        if self._wait is not None:
            self._value = self._wait()
            self._wait = None
        return self._value
