"""Tensors in safetensors files, complete or in slices: a Hugging Face model, or a checkpoint of any grid.

The header of a file with slices has their positions: {"slices": {key: [axis, start, shape of the full tensor]}}.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlcore.errors import ModelError
from rlcore_megatron.layout import Slice


class _Piece(NamedTuple):
    start: int
    stop: int
    axis: int
    file: Any


class TensorFiles:
    """Reader for any slice of any tensor; a context manager that keeps the files open.

    Raises:
        ModelError: a file is damaged.
    """

    def __init__(self, directory: Path, paths: Iterable[Path]) -> None:
        self._directory = directory
        self._files = ExitStack()
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._pieces: dict[str, list[_Piece]] = {}
        try:
            for path in sorted(paths):
                self._add(self._files.enter_context(safe_open(path, "pt")))
        except (SafetensorError, OSError, ValueError) as error:
            self._files.close()
            raise ModelError(f"{directory} has a damaged file: {error}\nCopy the whole directory again.") from error

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._files.close()

    def check(self, slices: Iterable[Slice], prefix: str = "") -> None:
        """Check that all slices can be read and that their tensors have the right shape.

        Raises:
            ModelError: a tensor is missing, incomplete or of another shape.
        """
        missing, other = [], []
        for where in slices:
            key = prefix + where.name
            if key not in self.shapes:
                missing.append(key)
            elif self.shapes[key] != where.shape:
                other.append(f"{key} has shape {list(self.shapes[key])} instead of {list(where.shape)}")
            elif sum(piece.stop - piece.start for piece in self._pieces[key]) != where.shape[self._pieces[key][0].axis]:
                missing.append(f"{key} (a part of it)")
        if other:
            raise ModelError(
                f"{self._directory}: {other[0]}; {len(other)} shapes differ\nUse the model that it belongs to."
            )
        if missing:
            raise ModelError(
                f"{self._directory} lacks {len(missing)} tensors, the first is {min(missing)}\n"
                "Copy the whole directory again. Nothing was loaded."
            )

    def read(self, where: Slice, prefix: str = "") -> Tensor:
        """Read one slice, concatenated from the stored pieces that overlap it."""
        found = []
        for piece in self._pieces[prefix + where.name]:
            whole = piece.axis != where.axis  # stored pieces split another dimension: read all of them
            start = piece.start if whole else max(piece.start, where.start)
            stop = piece.stop if whole else min(piece.stop, where.stop)
            if start < stop:
                index = [slice(None)] * len(where.shape)
                index[piece.axis] = slice(start - piece.start, stop - piece.start)
                found.append((piece.axis, piece.file.get_slice(prefix + where.name)[tuple(index)]))
        if not found:
            empty = list(where.shape)
            empty[where.axis] = 0
            return torch.empty(empty)
        tensor = torch.cat([part for _, part in found], found[0][0]) if len(found) > 1 else found[0][1]
        rows = where.stop - where.start
        return tensor if tensor.shape[where.axis] == rows else tensor.narrow(where.axis, where.start, rows)

    def _add(self, file: Any) -> None:
        placed = json.loads((file.metadata() or {}).get("slices", "{}"))
        for key in list(file.keys()):
            shape = tuple(file.get_slice(key).get_shape())
            axis, start, whole = placed.get(key, (0, 0, shape))
            self.shapes[key] = tuple(whole)
            pieces = self._pieces.setdefault(key, [])
            pieces.append(_Piece(start, start + shape[axis] if shape else 1, axis, file))
            pieces.sort(key=lambda piece: piece.start)


def write(path: Path, tensors: Mapping[str, Tensor], slices: Mapping[str, Slice]) -> None:
    """Write a file of slices."""
    places = {key: [where.axis, where.start, list(where.shape)] for key, where in slices.items()}
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path, {"slices": json.dumps(places)})
