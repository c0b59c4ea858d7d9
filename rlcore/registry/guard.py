"""A guard around the import of code that is not rlcore's: whatever ends the process is reported with the plugin's name.

`os._exit` becomes an error, an import that never ends is ended at a deadline, and a small shell process that outlives
this one prints the message when the import takes the whole process with it, as a segmentation fault does.
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
    """Turn `os._exit` into SystemExit, end the process at the deadline, and print `message` if the process ends.

    A guard within a guard does nothing: the outer plugin is the one that the user chose.
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
        faulthandler.dump_traceback_later(limit_s, exit=True, file=2)  # from C: works while a plugin holds the GIL
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
    """Return an `os._exit` that raises in this thread while the guard is up; forked children and others still exit."""
    process, thread = os.getpid(), threading.get_ident()

    def exit_or_raise(code: int) -> NoReturn:
        if not _guarding or os.getpid() != process:
            real_exit(code)
        if threading.get_ident() != thread:
            real_exit(code or 1)
        raise SystemExit(f"os._exit({code}) was called")

    return exit_or_raise
