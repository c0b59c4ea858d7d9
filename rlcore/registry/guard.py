"""A guard around the import of third-party code: if it ends the process, the plugin's name is reported.

`os._exit` becomes an error, an endless import is stopped at a deadline, and a small shell process prints the message if
the import ends the whole process, for example by a segmentation fault.
"""

from __future__ import annotations

import faulthandler
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

TIMEOUT = "RLCORE_IMPORT_TIMEOUT_S"
_PRINT_UNLESS_FED = 'read -r _ || printf "%s\\n" "$0" >&2'
_guarding = False


@contextmanager
def import_guard(message: str) -> Iterator[None]:
    """Convert `os._exit` to SystemExit, end the process at the deadline, and print `message` if the process ends.

    A nested guard has no effect: the outer plugin is the user's choice.
    """
    global _guarding
    if _guarding:
        yield
        return
    limit_s = _limit_s()
    _guarding = True
    real_exit = os._exit
    witness = subprocess.Popen(["/bin/sh", "-c", _PRINT_UNLESS_FED, message], stdin=subprocess.PIPE)
    try:
        os._exit = _exit_as_an_error(real_exit)  # type: ignore[assignment]
        faulthandler.dump_traceback_later(
            limit_s, exit=True, file=2
        )  # implemented in C, so it works while a plugin holds the GIL
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        os._exit = real_exit
        _guarding = False
        witness.communicate(b"alive\n", timeout=60)


def _limit_s() -> float:
    text = os.environ.get(TIMEOUT, "300")
    try:
        limit_s = float(text)
    except ValueError:
        limit_s = 0.0
    if not 0 < limit_s <= 86_400:
        raise ValueError(f"{TIMEOUT}={text} is not a number of seconds up to 86400")
    return limit_s


def _exit_as_an_error(real_exit: Callable[[int], NoReturn]) -> Callable[[int], NoReturn]:
    """Return an `os._exit` that raises in this thread under the guard; forks and other threads still exit."""
    process, thread = os.getpid(), threading.get_ident()

    def exit_or_raise(code: int) -> NoReturn:
        if not _guarding or os.getpid() != process:
            real_exit(code)
        if threading.get_ident() != thread:
            real_exit(code or 1)
        raise SystemExit(f"os._exit({code}) was called")

    return exit_or_raise
