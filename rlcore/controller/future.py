"""`Future`: the result of a group call that may still be under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

R = TypeVar("R")


class Future(Generic[R]):
    """Ask `result` once or many times; it waits at most until the call's deadline."""

    def __init__(self, wait: Callable[[], R]) -> None:
        self._wait: Callable[[], R] | None = wait
        self._value: R

    @classmethod
    def of(cls, value: R) -> Future[R]:
        """A future that is already there."""
        return cls(lambda: value)

    def result(self) -> R:
        """The result.

        Raises:
            DeadlineExceeded: the call's deadline passed.
            Exception: what the call itself raised.
        """
        if self._wait is not None:
            self._value = self._wait()
            self._wait = None
        return self._value
