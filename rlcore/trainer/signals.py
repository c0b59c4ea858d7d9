"""Handling of SIGTERM and ctrl-C, from before the first process starts until all have ended."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_CAUGHT = (signal.SIGINT, signal.SIGTERM)
_AGAIN_S = 0.05


class Signals:
    """Signal handlers of a run.

    During training the first signal requests a stop with a checkpoint; before and after, it ends the run at once.
    A second ctrl-C always ends it at once. `asked` is the number of the first signal, or 0.
    """

    def __init__(self, on_ask: Callable[[], None]) -> None:
        self.asked = 0
        self.in_steps = False
        self._on_ask = on_ask
        self._before: dict[int, Any] = {}

    def install(self) -> None:
        """Install the handlers; does nothing outside the main thread, where Python delivers no signals."""
        try:
            self._before = {number: signal.signal(number, self._ask) for number in _CAUGHT}
        except ValueError:
            self._before = {}
        if self._before:
            self._hook_before, sys.unraisablehook = sys.unraisablehook, self._again

    def restore(self) -> None:
        """Restore the handlers from before `install`."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._before:
            sys.unraisablehook = self._hook_before
        self._before = {}

    def _ask(self, number: int, frame: FrameType | None) -> None:
        first, self.asked = not self.asked, self.asked or number
        if number == signal.SIGINT and not (first and self.in_steps):
            raise KeyboardInterrupt
        if first and not self.in_steps:
            raise SystemExit(128 + number)
        if first:
            self._on_ask()

    def _again(self, dropped: sys.UnraisableHookArgs) -> None:
        """Send the signal again when Python dropped its exception, as it does in finalizers and fork callbacks."""
        if self.asked and isinstance(dropped.exc_value, KeyboardInterrupt | SystemExit):
            number = signal.SIGINT
            if isinstance(dropped.exc_value, SystemExit):
                number, self.asked = signal.SIGTERM, 0
            main = threading.main_thread().ident
            threading.Timer(_AGAIN_S, signal.pthread_kill, (main, number)).start()
        else:
            self._hook_before(dropped)
