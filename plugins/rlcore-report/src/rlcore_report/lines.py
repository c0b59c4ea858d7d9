"""Read JSON lines that another process may still be writing, and files that are too large to read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

MOST_BYTES = 64 * 2**20
"""Maximum size of a file that is read completely, in bytes."""
MOST_LINES = 10_000
"""Number of lines read from a larger file, spread evenly over it."""
_LONGEST_LINE = 4 * 2**20
"""Maximum length of a line in a sampled file; longer lines count as damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Objects read from a file."""

    rows: list[dict[str, Any]]
    notes: list[str]
    """Notes about lines that were left out, as sentences."""


def read_lines(path: Path, *, most_bytes: int = MOST_BYTES, most_lines: int = MOST_LINES) -> Lines:
    """Read a file of JSON objects. A missing file has no rows.

    An incomplete last line is ignored: a running process is writing it, or was killed. From a file of more than
    `most_bytes`, `most_lines` lines are read, among them the first and the last; a note says so.
    """
    if not path.exists():
        return Lines(rows=[], notes=[])
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        whole = size <= most_bytes
        lines: list[bytes] = file.readlines() if whole else list(_spread(file, size, most_lines))
    notes = []
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    rows = [row for row in _objects(lines) if row is not None]
    if not whole:
        about = round(size / max(1.0, sum(map(len, lines)) / max(1, len(lines))))
        notes.append(
            f"{path.name} has {size / 1e6:,.0f} MB: read {len(rows):,} of about {about:,} lines, evenly spread"
        )
    if damaged := len(lines) - len(rows):
        notes.append(f"{path.name}: left out {damaged} damaged line{'s' * (damaged > 1)}")
    return Lines(rows=rows, notes=notes)


def _spread(file: BinaryIO, size: int, count: int) -> Iterator[bytes]:
    """Yield the first line, the last one, and evenly spaced lines between them, `count` in all."""
    yield file.readline(_LONGEST_LINE)
    tail = _last_line(file, size)
    end = file.tell()
    for i in range(1, count - 1):
        at = size * i // count
        if at <= end:
            continue
        file.seek(at)
        file.readline(_LONGEST_LINE)  # the rest of a line
        if file.tell() >= tail:
            break
        yield file.readline(_LONGEST_LINE)
        end = file.tell()
    file.seek(tail)
    yield file.readline(_LONGEST_LINE)


def _last_line(file: BinaryIO, size: int) -> int:
    """Return the offset of the last complete line, without moving the file's position."""
    here, begin = file.tell(), max(0, size - 2 * _LONGEST_LINE)
    file.seek(begin)
    block = file.read()
    file.seek(here)
    return begin + block.rfind(b"\n", 0, block.rfind(b"\n")) + 1


def _objects(lines: Iterable[bytes]) -> Iterator[dict[str, Any] | None]:
    """Yield the object of each line; None for a damaged line."""
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        yield row if isinstance(row, dict) and isinstance(row.get("step"), int) else None
