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
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlcore.data.batch import Batch, object_array
from rlcore.errors import DataError, RunError

_FORMAT = 1
_LENGTHS = "num_tokens"
_AGAIN = "Record the batch again, or copy it again."


def save_batch(batch: Batch, directory: str | Path) -> None:
    """Write a batch to a new directory.

    Raises:
        DataError: the directory exists, or a column holds an object that JSON cannot represent, such as a tuple.
        RunError: the disk is full or read-only; nothing is left behind.
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
        for path in (*temporary.rglob("*"), temporary):
            flush(path)
        temporary.rename(target)
        flush(target.parent)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            raise RunError(f"{target} could not be written: {error}\nFree space, or choose another disk.") from error
        raise


def flush(path: Path) -> None:
    """Force a file or directory to the disk, so that a rename never precedes its data."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_batch(directory: str | Path) -> Batch:
    """Open a recorded batch. Only `batch.json` and the lengths are read; a column is read when it is used.

    Tensors are mapped copy-on-write, so that a change in place does not reach the file.

    Raises:
        DataError: it is not a recorded batch, a file is missing or has another size, or `batch.json` contradicts the
            files. An object column is checked when it is used.
    """
    directory = Path(directory)
    about = _read_about(directory)
    try:
        for name, size in about["files"].items():
            found = (directory / name).stat().st_size if (directory / name).is_file() else None
            if found != size:
                raise _Damage(f"{name} is missing" if found is None else f"{name} has {found:,} of its {size:,} bytes")
        return _opened(directory, about)
    except _Damage as damage:
        what = str(damage)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, RuntimeError, OSError) as error:
        what = f"batch.json is broken: {type(error).__name__}: {error}"
    raise DataError(f"{directory} is damaged: {what}\n{_AGAIN}")


class _Damage(Exception):
    """A contradiction between `batch.json` and the files."""


def _opened(directory: Path, about: Mapping[str, Any]) -> Batch:
    """Map the columns. `batch.json` may come from anyone, so it cannot name another type, size or place."""
    tensors: dict[str, dict[str, Tensor]] = {"row": {}, "token": {}}
    files: dict[str, Path] = {}
    for column in about["columns"]:
        name, level, file = str(column["name"]), column["level"], PurePosixPath(column["file"])
        if name in (*files, *tensors["row"], *tensors["token"]):
            raise _Damage(f"there are two columns '{name}'")
        size = about["files"].get(str(file), 0)  # a column without values has no file
        if file.is_absolute() or ".." in file.parts or (level == "object" and not size):
            raise _Damage(f"column '{name}' is not in one of its files, but in {file}")
        if level == "object":
            files[name] = directory / file
            continue
        dtype, shape = getattr(torch, column["dtype"], None), column["shape"]
        if not isinstance(dtype, torch.dtype) or not all(type(it) is int and it >= 0 for it in shape):
            raise _Damage(f"column '{name}' has type {column['dtype']!r} and shape {shape}")
        if math.prod(shape) * dtype.itemsize != size:
            raise _Damage(f"column '{name}' of shape {shape} does not fit its {size:,} bytes")
        if shape[:1] != [about[f"{level}s"]]:
            raise _Damage(f"column '{name}' has {shape[0] if shape else 1} values for {about[f'{level}s']} {level}s")
        tensors[level][name] = _map(directory / file, dtype, shape)
    lengths = tensors["row"].pop(_LENGTHS).clone()
    if lengths.dtype != torch.int64 or lengths.dim() != 1 or bool((lengths < 0).any()):
        raise _Damage(f"'{_LENGTHS}' are not lengths")
    if int(lengths.sum()) != about["tokens"]:
        raise _Damage(f"its lengths sum to {int(lengths.sum()):,}, but it has {about['tokens']:,} tokens")
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


def _map(file: Path, dtype: torch.dtype, shape: list[int]) -> Tensor:
    size = math.prod(shape)
    if size == 0:  # an empty file cannot be mapped
        return torch.empty(shape, dtype=dtype)
    return torch.from_file(str(file), shared=False, size=size, dtype=dtype).view(shape)


def _read_about(directory: Path) -> dict[str, Any]:
    try:
        about = json.loads((directory / "batch.json").read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"{directory} is not a recorded batch: {error}\n"
            "Record one:  rlcore try algorithm NAME --save DIR   or  rlcore.data.recorded.save_batch(batch, DIR)"
        ) from error
    found = about.get("format") if isinstance(about, dict) else None
    if found != _FORMAT:
        raise DataError(
            f"{directory} has format {found}, this version reads {_FORMAT}\nOpen it with the rlcore that wrote it."
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
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file} is damaged: {error}\n{_AGAIN}") from error
    if not isinstance(values, list) or len(values) != num_rows:
        raise DataError(f"{file} is damaged: expected a list of {num_rows} values\n{_AGAIN}")
    return object_array(values)
