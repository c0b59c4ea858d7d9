"""Bound what reward processes print: pass on the beginning, drop and count the rest.

The processes write to one pipe, which a thread of the parent empties all the time, so that none of them waits for it.
"""

from __future__ import annotations

import logging
import os
import threading

logger = logging.getLogger(__name__)
LIMIT = 64 * 1024
_CHUNK = 1024 * 1024
_DRAIN_S = 1.0
_STDERR = 2


class Output:
    """Standard output and error of all reward processes of an executor; they appear on the standard error of this one."""

    def __init__(self) -> None:
        reader, self.fd = os.pipe()
        self._thread = threading.Thread(target=_pass_on, args=(reader,), name="output of rewards", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Pass on what is still in the pipe. Give up after a second: a detached process may hold the pipe open."""
        os.close(self.fd)
        self._thread.join(_DRAIN_S)


def _pass_on(reader: int) -> None:
    num_bytes = 0
    while data := os.read(reader, _CHUNK):
        if num_bytes < LIMIT:
            _write(data[: LIMIT - num_bytes])
        if num_bytes <= LIMIT < num_bytes + len(data):
            logger.warning("rewards printed more than %d kB; from now on their output is dropped", LIMIT // 1024)
        num_bytes += len(data)
    os.close(reader)
    if num_bytes > LIMIT:
        logger.warning("rewards printed %.1f MB; %.1f MB of it was dropped", num_bytes / 1e6, (num_bytes - LIMIT) / 1e6)


def _write(data: bytes) -> None:
    try:
        os.write(_STDERR, data)
    except OSError as error:  # a full disk or a closed terminal must not stop the reading, which would block rewards
        logger.debug("output of rewards is lost: %s", error)
