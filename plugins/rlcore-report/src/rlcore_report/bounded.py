"""A recording file with a maximum size: each step may use only its share of the space."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

logger = logging.getLogger(__name__)


class BoundedFile:
    """JSON lines of at most `most_bytes`, spread evenly over the steps of a run.

    If it cannot be written, as on a full disk, the run continues without it.
    """

    def __init__(
        self, path: Path, most_bytes: int, total_steps: int, *, append: bool, warn: Callable[[str], None]
    ) -> None:
        """Open the file.

        Args:
            append: keep what an earlier part of the run wrote.
            warn: called with the reason if the file cannot be written.
        """
        self._path, self._most, self._total, self._warn = path, most_bytes, max(1, total_steps), warn
        self._used = path.stat().st_size if append and path.exists() else 0
        self._file: TextIO | None = None
        try:
            path.parent.mkdir(exist_ok=True)
            self._file = path.open("a" if append else "w", encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            self._give_up(error)

    def write(self, step: int, rows: Iterable[Mapping[str, Any]]) -> int:
        """Write the rows that fit in the share of the steps so far; return their number."""
        if self._file is None:
            return 0
        room = self._most * min(step + 1, self._total + 1) // (self._total + 1) - self._used
        written = 0
        try:
            for row in rows:
                line = json.dumps(row, ensure_ascii=False, default=str) + "\n"
                size = len(line.encode("utf-8", errors="backslashreplace"))
                if size > room:
                    break
                self._file.write(line)
                room, self._used, written = room - size, self._used + size, written + 1
            self._file.flush()
        except OSError as error:
            self._give_up(error)
        return written

    def close(self) -> None:
        """Close the file; later rows are dropped."""
        file, self._file = self._file, None
        try:
            if file is not None:
                file.close()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._warn(f"{self._path}: {error.strerror}")
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError:
                logger.debug("%s could not be closed either", self._path)
