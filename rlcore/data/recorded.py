"""Recorded batches: a `Batch` as a directory whose columns are read when they are used.

    step_000017/
      tensors/        rows/ and tokens/, one file per column, in the memory-mapped layout of TensorDict
      objects/0.json  a column of Python objects as a JSON list, one file per column
      batch.json      each column with its file, type and shape, and the size of every file

Nothing is pickled. `TensorDict.load_memmap("step_000017/tensors")` opens the columns without rlcore; `rows/num_tokens`
has the length of each sample. A directory is written under a temporary name and renamed, so it is complete or absent.
"""

from __future__ import annotations

import json
import math
import os
import reprlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlcore.data.batch import Batch, object_array
from rlcore.errors import DataError

_FORMAT = 1
_LENGTHS = "num_tokens"


def save_batch(batch: Batch, directory: str | Path) -> None:
    """Write a batch to a new directory.

    Raises:
        DataError: the directory exists, or a column holds an object that JSON cannot represent, such as a tuple.
        OSError: the disk is full or read-only; nothing is left behind.
    """
    target = Path(directory)
    if target.exists():
        raise DataError(f"{target} exists\nChoose another directory, or remove it:  rm -r {target}")
    batch = batch.local().to("cpu")
    texts = {name: _as_json(name, values) for name, values in batch.objects.items()}
    temporary = target.with_name(f".{target.name}.writing")
    shutil.rmtree(temporary, ignore_errors=True)  # left by a process that was killed
    try:
        (temporary / "objects").mkdir(parents=True)
        columns = _write_tensors(batch, temporary)
        for number, (name, text) in enumerate(texts.items()):
            file = f"objects/{number}.json"
            (temporary / file).write_text(text)
            columns.append({"name": name, "level": "object", "file": file})
        files = {str(it.relative_to(temporary)): it.stat().st_size for it in temporary.rglob("*") if it.is_file()}
        about = {"format": _FORMAT, "rows": len(batch), "tokens": batch.num_tokens, "columns": columns, "files": files}
        (temporary / "batch.json").write_text(json.dumps(about))
        temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def open_batch(directory: str | Path) -> Batch:
    """Open a recorded batch. Only `batch.json` and the lengths are read; a column is read when it is used.

    Tensors are mapped copy-on-write, so that a change in place does not reach the file.

    Raises:
        DataError: it is not a recorded batch, or a file is missing or has another size. An object column is checked
            when it is used.
    """
    directory = Path(directory)
    about = _read_about(directory)
    for name, size in about["files"].items():
        found = (directory / name).stat().st_size if (directory / name).is_file() else None
        if found != size:
            what = "is missing" if found is None else f"has {found:,} of its {size:,} bytes"
            raise DataError(f"{directory} is damaged: {name} {what}\nRecord the batch again, or copy it again.")
    sizes = {"row": about["rows"], "token": about["tokens"]}
    tensors: dict[str, dict[str, Tensor]] = {"row": {}, "token": {}}
    files: dict[str, Path] = {}
    for column in about["columns"]:
        if column["level"] == "object":
            files[column["name"]] = directory / column["file"]
            continue
        tensor = _map(directory / column["file"], column["dtype"], column["shape"])
        if len(tensor) != sizes[column["level"]]:
            raise DataError(
                f"{directory} is damaged: column '{column['name']}' has {len(tensor)} values\nRecord it again."
            )
        tensors[column["level"]][column["name"]] = tensor
    lengths = tensors["row"].pop(_LENGTHS).clone()
    return Batch(tensors["row"], tensors["token"], lengths, _Objects(files, about["rows"]))


class _Objects(Mapping[str, np.ndarray]):
    """Object columns by name, each read from its file at the first access."""

    def __init__(self, files: Mapping[str, Path], num_rows: int) -> None:
        self._files, self._num_rows = files, num_rows
        self._read: dict[str, np.ndarray] = {}

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._read:
            self._read[name] = _read_objects(self._files[name], self._num_rows)
        return self._read[name]

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _write_tensors(batch: Batch, directory: Path) -> list[dict[str, Any]]:
    """Write the tensors and return their descriptions. Disk space is reserved first, because a write to a map cannot report a full disk."""
    from tensordict import TensorDict

    levels = {"rows": {**batch.row_columns, _LENGTHS: batch.lengths}, "tokens": dict(batch.token_columns)}
    sizes = {"rows": len(batch), "tokens": batch.num_tokens}
    sections = {name: TensorDict(columns, batch_size=[sizes[name]]) for name, columns in levels.items()}
    layout = TensorDict(sections).memmap_like(str(directory / "tensors"))
    described = []
    for section, columns in levels.items():
        for name, column in columns.items():
            mapped = layout[section, name]
            if column.numel():
                _reserve(Path(mapped.filename), column.nbytes)
                mapped.copy_(column.detach())
            described.append(
                {
                    "name": name,
                    "level": section.removesuffix("s"),
                    "dtype": str(column.dtype).removeprefix("torch."),
                    "shape": list(column.shape),
                    "file": f"tensors/{section}/{Path(mapped.filename).name}",
                }
            )
    return described


def _reserve(file: Path, size: int) -> None:
    with file.open("r+b") as stream:
        os.posix_fallocate(stream.fileno(), 0, size)


def _map(file: Path, dtype: str, shape: list[int]) -> Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    size = math.prod(shape)
    if size == 0:  # an empty file cannot be mapped
        return torch.empty(shape, dtype=kind)
    return torch.from_file(str(file), shared=False, size=size, dtype=kind).view(shape)


def _read_about(directory: Path) -> dict[str, Any]:
    try:
        about = json.loads((directory / "batch.json").read_text())
    except (OSError, ValueError) as error:
        raise DataError(
            f"{directory} is not a recorded batch: {error}\n"
            "Record one:  rlcore try algorithm NAME --save DIR   or  rlcore.data.recorded.save_batch(batch, DIR)"
        ) from error
    if about.get("format") != _FORMAT:
        raise DataError(
            f"{directory} has format {about.get('format')}, this version reads {_FORMAT}\n"
            "Open it with the rlcore that wrote it."
        )
    return dict(about)


def _as_json(name: str, values: np.ndarray) -> str:
    for row, value in enumerate(values):
        if not _is_json(value):
            raise DataError(
                f"column '{name}', row {row}: JSON cannot represent {reprlib.repr(value)}\n"
                f"Leave the column out:  batch.drop('{name}')"
            )
    return json.dumps(values.tolist())


def _is_json(value: Any) -> bool:
    """Return whether a value is the same after JSON, which has no tuples, no NaN and only texts as keys."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(part) for key, part in value.items())
    if isinstance(value, list):
        return all(_is_json(part) for part in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, str | int)


def _read_objects(file: Path, num_rows: int) -> np.ndarray:
    try:
        values = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{file} is damaged: {error}\nRecord the batch again.") from error
    if not isinstance(values, list) or len(values) != num_rows:
        raise DataError(f"{file} is damaged: expected a list of {num_rows} values\nRecord the batch again.")
    return object_array(values)
