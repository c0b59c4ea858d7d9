"""Time and memory limits for code that comes with data or a model, such as a chat template."""

from __future__ import annotations

import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

LIMIT_S = 10.0
LIMIT_BYTES = 4 * 2**30


@contextmanager
def limited() -> Iterator[Callable[[], None]]:
    """Raise TimeoutError or MemoryError if the block exceeds the limit of time or memory.

    Yields a function that restarts the time, which is cheaper than a separate block for each render. Python handles
    signals only in the main thread; other threads have no limit. Memory is limited on Linux only.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, _raise_late)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (_address_space(soft), hard))
        timer = signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
        try:
            yield _restart
        finally:
            signal.setitimer(signal.ITIMER_REAL, *timer)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGALRM, handler)


def _address_space(present_limit: int) -> int:
    """Return the address-space limit for the block, at most the current limit."""
    if sys.platform != "linux":
        return present_limit
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + LIMIT_BYTES
    return limit if present_limit < 0 else min(present_limit, limit)


def _restart() -> None:
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)


def _raise_late(*_: object) -> NoReturn:
    raise TimeoutError(f"took longer than {LIMIT_S:g} s")
