"""Child processes that report JSON lines, so that a plugin that hangs or crashes does not end the command."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO, Any

_POLL_S = 0.02
_EXIT_S = 5.0
"""Time for a child to exit after its last message."""


class Child:
    """Process of a module; a context manager that kills it with all processes that it started.

    The module reports with `open_messages`; everything else that it prints goes to `printed`.
    """

    def __init__(self, module: str, *arguments: str, printed: IO[Any], **variables: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-X", "faulthandler", "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=printed,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)} | variables,
        )
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.reason = ""
        """Reason why there are no more messages."""

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=30)
        self._reader.join(_EXIT_S)

    def messages(
        self, timeout_s: float, *, together: bool = False, is_over: Callable[[], bool] = bool
    ) -> Iterator[dict[str, Any]]:
        """Yield messages until the process ends, one does not arrive in time, or `is_over()`.

        Args:
            timeout_s: time limit of each message, or of all `together`.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._lines.get(timeout=_POLL_S)
            except queue.Empty:
                if is_over():
                    self.reason = "interrupted"
                    return
                if time.monotonic() > deadline:
                    self.reason = (
                        f"not finished within {timeout_s:g} s" if together else f"no answer in {timeout_s:g} s"
                    )
                    return
                continue
            if not line.endswith(b"\n"):
                self.reason = f"the process ended with {self._exit()}"
                return
            yield json.loads(line)
            deadline = deadline if together else time.monotonic() + timeout_s

    def _read(self) -> None:
        assert self._process.stdout is not None, "the child has a pipe"
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put(b"")

    def _exit(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_S)
        code = self._process.returncode
        return f"signal {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"


def open_messages() -> Callable[..., None]:
    """Return a function that reports a message to the parent; other output to stdout goes to stderr."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return lambda **message: print(json.dumps(message), file=out, flush=True)
