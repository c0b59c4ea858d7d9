"""Deadlines of tests, which only end hangs, so that no test fails because a machine is busy."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

HANG_S: Final = 300.0
"""Seconds after which an operation counts as hung."""


def wait_until(condition: Callable[[], object]) -> None:
    """Poll until the condition is true; fail after HANG_S seconds."""
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, f"not true within {HANG_S:g} s"
        time.sleep(0.02)
