"""Limit the output of reward processes: forward the beginning, drop and count the rest.

The processes write to one pipe, which a thread of the parent drains continuously, so that none of them blocks.
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
    """Standard output and error of all reward processes of an executor, forwarded to this process's standard error."""

    def __init__(self) -> None:
        reader, self.fd = os.pipe()
        self._thread = threading.Thread(target=_pass_on, args=(reader,), name="output of rewards", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Forward the rest of the pipe, for at most a second: a detached process may hold it open."""
        os.close(self.fd)
        self._thread.join(_DRAIN_S)


def _pass_on(reader: int) -> None:
    num_bytes = 0
    while data := os.read(reader, _CHUNK):
        if num_bytes < LIMIT:
            _write(data[: LIMIT - num_bytes])
        if num_bytes <= LIMIT < num_bytes + len(data):
            logger.warning("rewards printed more than %d kB; dropping their further output", LIMIT // 1024)
        num_bytes += len(data)
    os.close(reader)
    if num_bytes > LIMIT:
        logger.warning(
            "rewards printed %.1f MB, of which %.1f MB were dropped", num_bytes / 1e6, (num_bytes - LIMIT) / 1e6
        )


def _write(data: bytes) -> None:
    try:
        os.write(_STDERR, data)
    except OSError as error:  # continue reading despite a full disk or a closed terminal, or rewards would block
        logger.debug("output of rewards is lost: %s", error)
