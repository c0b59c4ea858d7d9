"""`FileDataset`: rows of JSONL, JSON, CSV, Parquet and Arrow files, the built-in dataset.

Created at the start of a run (registry kind `dataset`, name `files`). It reads all rows at once, so that a broken line
is reported before GPU time is spent. `rlcore.data.prompts` turns the rows into prompts.
"""

from __future__ import annotations

import csv
import glob
import json
import logging
import os
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcore.data.hub import is_hub_name, read_hub
from rlcore.errors import DataError, did_you_mean, import_optional

logger = logging.getLogger(__name__)

_WHAT_TO_WRITE = "Write a .jsonl, .json, .csv, .parquet or .arrow file, a directory of such files, a glob, or a comma-separated list."
_MAX_DEPTH = 64
_TOO_DEEP = f"nests lists and objects more than {_MAX_DEPTH} deep\nWrite that value as text, or remove the row."
_JSON_LINE = 'Each line must be one JSON object: {"prompt": "..."}. Correct the line or remove it.'


class FileDataset:
    """Rows of one or more files, in the given order; files of a directory or a glob are sorted.

    Example: FileDataset("data/gsm8k/train.jsonl")[0]["question"]
    """

    def __init__(self, path: str, config: object = None) -> None:
        self.name = path
        self._rows: list[Mapping[str, object]] = []
        self._files: list[_File] = []
        self._starts: list[int] = []
        paths = _expand(path)
        if len(paths) > 1:
            logger.info("%s has %d files: %s", path, len(paths), ", ".join(map(str, paths)))
        for file in map(_read, paths):
            self._starts.append(len(self._rows))
            self._files.append(file)
            self._rows += file.rows
        self.columns: Sequence[str] = list(dict.fromkeys(name for row in self._rows for name in row))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Mapping[str, object]:
        row = self._rows[index]
        return row if len(row) == len(self.columns) else {name: row.get(name) for name in self.columns}

    def where(self, index: int) -> str:
        """Return the location of a row: "train.jsonl:17" for line 17, "train.parquet, row 17" for the 17th row."""
        number = bisect_right(self._starts, index) - 1
        file, offset = self._files[number], index - self._starts[number]
        return f"{file.path}:{file.lines[offset]}" if file.lines else f"{file.path}, row {offset + 1}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    path: Path
    rows: list[dict[str, object]]
    lines: Sequence[int] = ()
    """Line of each row, from 1; empty if the format has no lines."""


def _expand(spec: str) -> list[Path]:
    # os.path, because Path.exists raises if a long list is not a valid file name.
    parts = (
        [spec]
        if os.path.exists(os.path.expanduser(spec))
        else [part.strip() for part in spec.split(",") if part.strip()]
    )
    if not spec.strip() or not parts:
        raise DataError(f"the path of a dataset is empty\n{_WHAT_TO_WRITE}")
    return [path for part in parts for path in _expand_part(part)]


def _expand_part(part: str) -> list[Path]:
    path = Path(part).expanduser()
    if path.is_dir():
        return _files_of_directory(path)
    if path.exists():
        return [path]
    if any(character in part for character in "*?["):
        found = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
        if not found:
            raise DataError(f"no file matches '{part}'\n{_WHAT_TO_WRITE}")
        return found
    if is_hub_name(part) and path.suffix not in _READERS:
        return [path]
    raise DataError(f"no such file: '{part}'{_near(path)}\n{_WHAT_TO_WRITE}")


def _near(path: Path) -> str:
    if not path.parent.is_dir():
        return f"; there is no directory '{path.parent}' either"
    hint = did_you_mean(path.name, [other.name for other in path.parent.iterdir()])
    return f" in '{path.parent}'.{hint}" if hint else f" in '{path.parent}'"


def _files_of_directory(directory: Path) -> list[Path]:
    if (directory / "state.json").exists():
        return _shards_of_saved_dataset(directory)
    if (directory / "dataset_dict.json").exists():
        splits = sorted(path.name for path in directory.iterdir() if path.is_dir())
        raise DataError(
            f"'{directory}' holds several splits: {', '.join(splits)}\nWrite one of them, such as '{directory / splits[0]}'."
        )
    paths = sorted(path for path in directory.iterdir() if path.suffix in _READERS and not path.name.startswith("."))
    kinds = sorted({path.suffix for path in paths})
    if not kinds:
        raise DataError(f"'{directory}' holds no file that can be read\n{_WHAT_TO_WRITE}")
    if len(kinds) > 1:
        raise DataError(
            f"'{directory}' holds files of several kinds: {', '.join(kinds)}\n"
            f"Write a glob that chooses, such as '{directory}/*{kinds[-1]}'."
        )
    return paths


def _shards_of_saved_dataset(directory: Path) -> list[Path]:
    # A directory of Hugging Face `save_to_disk` may also hold caches (`cache-*.arrow`), which are not part of the data.
    state = json.loads((directory / "state.json").read_text(encoding="utf-8"))
    return [directory / shard["filename"] for shard in state["_data_files"]]


def _read(path: Path) -> _File:
    if not path.exists():
        return _File(path=path, rows=read_hub(str(path)))
    reader = _READERS.get(path.suffix)
    if reader is None:
        hint = did_you_mean(path.suffix, list(_READERS))
        raise DataError(f"{path}: cannot read files that end in '{path.suffix}'.{hint}\n{_WHAT_TO_WRITE}")
    try:
        file = reader(path)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}\nCheck that the file is complete and readable.") from error
    if not file.rows:
        raise DataError(f"{path} has no rows\nRemove it from the list, or fetch it again if it should have some.")
    return file


def read_jsonl(path: Path) -> _File:
    """Read the objects of a JSONL file and their lines; raise DataError for a line that is not an object."""
    rows: list[dict[str, object]] = []
    lines: list[int] = []
    # Bytes, because text mode also splits at "\r"; only "\n" ends a line of JSONL.
    with path.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                rows.append(_json_object(line, f"{path}:{number}"))
                lines.append(number)
    return _File(path=path, rows=rows, lines=lines)


def _json_object(line: bytes, where: str) -> dict[str, object]:
    try:
        row = json.loads(line.rstrip().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8: {error.reason}\nSave the file as UTF-8.") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not valid JSON: {error.msg} at character {error.pos + 1}\n{_JSON_LINE}") from error
    except ValueError as error:  # an integer with more digits than Python parses
        raise DataError(f"{where}: not valid JSON: {error}\n{_JSON_LINE}") from error
    except RecursionError:
        raise DataError(f"{where}: {_TOO_DEEP}") from None
    if not isinstance(row, dict):
        raise DataError(f"{where}: a {type(row).__name__}, not an object\n{_JSON_LINE}")
    if line.count(b"[") + line.count(b"{") > _MAX_DEPTH and _is_too_deep(row):
        raise DataError(f"{where}: {_TOO_DEEP}")
    return row


def _is_too_deep(value: object) -> bool:
    """Return whether values nest so deeply that pickling or logging them could exceed Python's recursion limit."""
    level = [value]
    for _ in range(_MAX_DEPTH + 1):
        containers = [item for item in level if isinstance(item, dict | list)]
        level = [child for item in containers for child in (item.values() if isinstance(item, dict) else item)]
    return bool(containers)


def _read_json(path: Path) -> _File:
    content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if not content.lstrip().startswith(b"["):
        return read_jsonl(path)
    try:
        rows = json.loads(content)
    except ValueError as error:
        raise DataError(f"{path}: not valid JSON: {error}\nThe file must be one list of objects.") from error
    except RecursionError:
        raise DataError(f"{path}: {_TOO_DEEP}") from None
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise DataError(
                f"{path}, row {number}: a {type(row).__name__}, not an object\nThe file must be one list of objects."
            )
        if _is_too_deep(row):
            raise DataError(f"{path}, row {number}: {_TOO_DEEP}")
    return _File(path=path, rows=rows)


def _read_csv(path: Path) -> _File:
    """Read a table with a header; an empty cell is None, and an object or a list of objects as JSON is read as such."""
    allowed = csv.field_size_limit(sys.maxsize)
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            rows = dict(_csv_rows(path, csv.reader(stream, strict=True)))
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8: {error.reason}\nSave the file as UTF-8.") from error
    finally:
        csv.field_size_limit(allowed)
    return _File(path=path, rows=list(rows.values()), lines=list(rows))


def _csv_rows(path: Path, reader: Any) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield the first line and the values of each row."""
    header: list[str] = []
    line = 1
    try:
        for cells in reader:
            where, number, line = f"{path}:{line}", line, reader.line_num + 1
            if not header and len(set(cells)) < len(cells):
                raise DataError(f"{where}: two columns have the same name: {', '.join(cells)}\nRename one of them.")
            if header and cells and len(cells) != len(header):
                raise DataError(
                    f"{where}: {len(cells)} values for the {len(header)} columns {', '.join(header)}\n"
                    'Quote a value that has a comma or a line break: "a, b"'
                )
            if header and cells:
                yield number, {name: _cell(cell, where) for name, cell in zip(header, cells, strict=True)}
            header = header or cells
    except csv.Error as error:
        raise DataError(f"{path}:{line}: not valid CSV: {error}\nWrite a quote within quotes twice.") from error


def _cell(text: str, where: str) -> object:
    """Return the value of a cell of a CSV file."""
    if not text.startswith(("{", "[")):
        return text or None
    try:
        value = json.loads(text)
    except ValueError:  # a text that begins with a bracket
        return text
    except RecursionError:
        raise DataError(f"{where}: {_TOO_DEEP}") from None
    items = value if isinstance(value, list) else [value]
    if not items or not all(isinstance(item, dict) for item in items):
        return text  # such as [1, 2]
    if _is_too_deep(value):
        raise DataError(f"{where}: {_TOO_DEEP}")
    return value


def _read_parquet(path: Path) -> _File:
    parquet = _pyarrow(path, "pyarrow.parquet")
    return _File(path=path, rows=_rows_of_table(path, lambda: parquet.read_table(path)))


def _read_arrow(path: Path) -> _File:
    ipc = _pyarrow(path, "pyarrow.ipc")

    def table() -> Any:
        with path.open("rb") as source:
            is_file = source.read(6) == b"ARROW1"
            source.seek(0)
            return (ipc.open_file(source) if is_file else ipc.open_stream(source)).read_all()

    return _File(path=path, rows=_rows_of_table(path, table))


def _rows_of_table(path: Path, read: Callable[[], Any]) -> list[dict[str, object]]:
    from pyarrow import ArrowException

    try:
        rows: list[dict[str, object]] = read().to_pylist()
    except ArrowException as error:
        reason = str(error).splitlines()[0]
        raise DataError(f"{path}: not a {path.suffix} file: {reason}\nDownload or write the file again.") from error
    return rows


def _pyarrow(path: Path, module: str) -> Any:
    return import_optional(module, f"{path}: reading {path.suffix} files", "rlcore[parquet]")


_READERS: dict[str, Callable[[Path], _File]] = {
    ".jsonl": read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}
