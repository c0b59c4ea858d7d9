"""`BatchRef`: a Batch whose large columns stay in the processes that created them.

A group call returns one; passing it to the next group moves columns from worker to worker, not through the controller.
The controller holds only the lengths and the numeric row columns. Token columns and objects are far; `take`, `split`,
`balance` and similar operations only compose row orders, and `fetch` copies the named columns to this process.
The operations are those of `Batch`, so that algorithms work with either.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rlcore.data.batch import Batch, check_same_columns, missing_column, row_index, split_bounds
from rlcore.data.shares import UNIT, balanced_order, run_sizes, token_index
from rlcore.errors import ColumnError

_Base: Any = object
"""Any to a type checker, so that a reference is accepted wherever a Batch is."""


_REF_BYTES = 160
"""Size of one reference in a message, measured with Ray 2.60."""


class Store(Protocol):
    """Storage of far columns: Ray's object store, or this process."""

    def put(self, values: Sequence[Tensor | list[Any]]) -> list[Any]:
        """Store the values and return a reference for each."""

    def get(self, refs: Sequence[Any]) -> list[Any]:
        """Return the values within the runtime's deadline."""


@dataclass(frozen=True, slots=True)
class Part:
    """One column of one shard, as created by its worker."""

    ref: Any
    lengths: np.ndarray
    """[rows of the shard] int64, tokens of each row."""


@dataclass(frozen=True, slots=True)
class FarColumn:
    """A column in parts; its row i is row order[i] of the concatenated parts."""

    level: str
    parts: tuple[Part, ...]
    order: np.ndarray | None = None

    def take(self, rows: np.ndarray) -> FarColumn:
        return replace(self, order=rows if self.order is None else self.order[rows])._trim()

    def _trim(self) -> FarColumn:
        """Drop parts that no row needs."""
        if len(self.parts) == 1 or self.order is None:
            return self
        starts = np.cumsum([0, *(len(part.lengths) for part in self.parts)])
        which = np.searchsorted(starts, self.order, side="right") - 1
        used = np.unique(which) if len(which) else np.array([0])  # keep one part for the dtype
        if len(used) == len(self.parts):
            return self
        shift = np.zeros(len(self.parts), dtype=np.int64)
        shift[used] = np.cumsum([0, *(len(self.parts[p].lengths) for p in used)])[:-1] - starts[used]
        return FarColumn(self.level, tuple(self.parts[p] for p in used), self.order + shift[which])

    def gather(self, values: Sequence[Any]) -> Any:
        """Assemble the column as one Tensor or array from the values of its parts."""
        if self.level == "object":
            objects = [value for part in values for value in part]
            rows = range(len(objects)) if self.order is None else self.order
            column = np.empty(len(rows), dtype=object)
            for i, row in enumerate(rows):
                column[i] = objects[row]
            return column
        if self.order is None:
            return values[0] if len(values) == 1 else torch.cat(list(values))
        starts = np.cumsum([0, *(len(part.lengths) for part in self.parts)])
        pieces, lengths, places = [], [], []
        for value, part, start, stop in zip(values, self.parts, starts, starts[1:]):
            place = np.flatnonzero((self.order >= start) & (self.order < stop))
            rows = self.order[place] - start
            pieces.append(_rows_of(value, part.lengths, rows))
            lengths.append(part.lengths[rows])
            places.append(place)
        back = np.argsort(np.concatenate(places), kind="stable")
        return _rows_of(pieces[0] if len(pieces) == 1 else torch.cat(pieces), np.concatenate(lengths), back)

    @staticmethod
    def cat(columns: Sequence[FarColumn]) -> FarColumn:
        orders, start = [], 0
        for column in columns:
            rows = sum(len(part.lengths) for part in column.parts)
            orders.append((np.arange(rows) if column.order is None else column.order) + start)
            start += rows
        plain = all(column.order is None for column in columns)
        parts = tuple(part for column in columns for part in column.parts)
        return FarColumn(columns[0].level, parts, None if plain else np.concatenate(orders))


@dataclass(frozen=True, slots=True, eq=False)
class BatchRef(_Base):  # type: ignore[misc]
    """B samples, of which only lengths and numeric row columns are in this process."""

    row_lengths: np.ndarray
    """[B] int64."""
    near: Mapping[str, np.ndarray]
    """[B, …] numeric row columns."""
    far: Mapping[str, FarColumn]
    store: Store | None = None

    @classmethod
    def publish(cls, batch: Batch, store: Store) -> BatchRef:
        """Put the large columns of a Batch in the store and keep the small ones."""
        lengths = batch.lengths.numpy()
        token_names, object_names = list(batch.token_columns), list(batch.objects)
        values = [batch.token_columns[n] for n in token_names] + [list(batch.objects[n]) for n in object_names]
        refs = store.put(values)
        levels = ["token"] * len(token_names) + ["object"] * len(object_names)
        far = {
            name: FarColumn(level, (Part(ref, lengths),))
            for name, level, ref in zip(token_names + object_names, levels, refs)
        }
        near = {name: column.cpu().numpy() for name, column in batch.row_columns.items()}
        return cls(lengths, near, far, store)

    def __len__(self) -> int:
        return len(self.row_lengths)

    def __repr__(self) -> str:
        return f"BatchRef({len(self)} rows, {self.num_tokens} tokens, columns: {', '.join(self.columns)})"

    def __reduce__(self) -> Any:
        return BatchRef, (self.row_lengths, dict(self.near), dict(self.far))

    @property
    def lengths(self) -> Tensor:
        return torch.from_numpy(np.array(self.row_lengths))

    @property
    def num_tokens(self) -> int:
        return int(self.row_lengths.sum())

    @property
    def columns(self) -> list[str]:
        return [
            *(n for n, c in self.far.items() if c.level == "token"),
            *self.near,
            *(n for n, c in self.far.items() if c.level == "object"),
        ]

    @property
    def num_bytes(self) -> int:
        """Approximate size in a message; an array that columns share is sent once."""
        parts = [part for column in self.far.values() for part in column.parts]
        orders = [column.order for column in self.far.values() if column.order is not None]
        arrays = [self.row_lengths, *self.near.values(), *orders, *(part.lengths for part in parts)]
        return sum({id(array): array.nbytes for array in arrays}.values()) + len(parts) * _REF_BYTES

    def __contains__(self, name: object) -> bool:
        return name in self.near or name in self.far

    def __getitem__(self, name: str) -> Any:
        return self.fetch(name)

    def level(self, name: str) -> str:
        self._check([name])
        return self.far[name].level if name in self.far else "row"

    def fetch(self, *names: str) -> Any:
        """Copy the named columns to this process: Tensors or numpy arrays of objects, as a tuple if several."""
        self._check(names)
        distant = [name for name in names if name in self.far]
        values = dict(zip(distant, self._bring([self.far[name] for name in distant])))
        columns = tuple(
            values[name] if name in values else torch.from_numpy(np.array(self.near[name])) for name in names
        )
        return columns[0] if len(columns) == 1 else columns

    def local(self) -> Batch:
        """Copy everything to this process as a Batch."""
        far = dict(zip(self.far, self._bring(list(self.far.values()))))
        return Batch.of(
            lengths=np.array(self.row_lengths),
            tokens={name: value for name, value in far.items() if self.far[name].level == "token"},
            rows={name: torch.from_numpy(np.array(value)) for name, value in self.near.items()}
            | {name: value for name, value in far.items() if self.far[name].level == "object"},
        )

    def select(self, *names: str) -> BatchRef:
        self._check(names)
        return self._only(set(names))

    def drop(self, *names: str) -> BatchRef:
        self._check(names)
        return self._only(set(self.columns) - set(names))

    def rename(self, **names: str) -> BatchRef:
        self._check(names)
        new = [names.get(name, name) for name in self.columns]
        if len(set(new)) != len(new):
            raise ValueError(f"rename({names}): two columns would have one name")
        return replace(
            self,
            near={names.get(k, k): v for k, v in self.near.items()},
            far={names.get(k, k): v for k, v in self.far.items()},
        )

    def with_rows(self, **columns: Any) -> BatchRef:
        return self._with(Batch.of(lengths=self.row_lengths, rows=columns), set(columns))

    def with_tokens(self, **columns: Any) -> BatchRef:
        return self._with(Batch.of(lengths=self.row_lengths, tokens=columns), set(columns))

    def merge(self, other: Batch) -> BatchRef:
        if isinstance(other, Batch):
            other = BatchRef.publish(other, self._store())
        if not isinstance(other, BatchRef):
            raise TypeError(f"merge takes a Batch or BatchRef, got {type(other).__name__}")
        has_tokens = any(column.level == "token" for column in other.far.values())
        if len(other) != len(self) or (has_tokens and not np.array_equal(self.row_lengths, other.row_lengths)):
            raise ValueError(f"merge needs the same rows: {self!r} and {other!r} have other lengths")
        for name in other.columns:
            if name in self and not self._same_column(name, other):
                raise ValueError(f"column '{name}' is in both batches with other values or levels; drop or rename one")
        return replace(self, near={**self.near, **other.near}, far={**self.far, **other.far})

    def __or__(self, other: Batch) -> BatchRef:
        return self.merge(other)

    def take(self, index: Sequence[int] | np.ndarray | Tensor) -> BatchRef:
        rows = row_index(index, len(self)).numpy()
        return replace(
            self,
            row_lengths=self.row_lengths[rows],
            near={name: column[rows] for name, column in self.near.items()},
            far={name: column.take(rows) for name, column in self.far.items()},
        )

    def slice(self, start: int, stop: int) -> BatchRef:
        if (start, stop) == (0, len(self)):
            return self
        return self.take(np.arange(start, stop))

    def split(self, sizes: Sequence[int]) -> list[BatchRef]:
        return [self.slice(start, stop) for start, stop in split_bounds(sizes, len(self))]

    def repeat(self, n: int) -> BatchRef:
        return self.take(np.repeat(np.arange(len(self)), n))

    def balance(self, num_parts: int) -> BatchRef:
        return self.take(balanced_order(self.row_lengths, num_parts, self.unit_sizes()))

    def unit_sizes(self) -> np.ndarray:
        return run_sizes(self.near[UNIT], UNIT) if UNIT in self.near else np.ones(len(self), dtype=np.int64)

    @staticmethod
    def cat(batches: Iterable[Batch]) -> BatchRef:
        refs: list[BatchRef] = []
        for batch in batches:
            if not isinstance(batch, BatchRef):
                raise TypeError(f"BatchRef.cat takes references, got {type(batch).__name__}")
            refs.append(batch)
        if not refs:
            raise ValueError("cat needs at least one batch")
        for other in refs[1:]:
            check_same_columns(refs[0].columns, other.columns)
        refs = [ref for ref in refs if len(ref)] or refs[:1]  # columns of empty shares may have another dtype
        if len(refs) == 1:
            return refs[0]
        return BatchRef(
            np.concatenate([ref.row_lengths for ref in refs]),
            {name: np.concatenate([ref.near[name] for ref in refs]) for name in refs[0].near},
            {name: FarColumn.cat([ref.far[name] for ref in refs]) for name in refs[0].far},
            refs[0].store,
        )

    def _check(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self:
                raise ColumnError(missing_column(name, self.columns))

    def _store(self) -> Store:
        assert self.store is not None, "a BatchRef without its store"
        return self.store

    def _bring(self, columns: Sequence[FarColumn]) -> list[Any]:
        refs = [part.ref for column in columns for part in column.parts]
        values = iter(self._store().get(refs)) if refs else iter(())
        return [column.gather([next(values) for _ in column.parts]) for column in columns]

    def _only(self, names: set[str]) -> BatchRef:
        return replace(
            self,
            near={k: v for k, v in self.near.items() if k in names},
            far={k: v for k, v in self.far.items() if k in names},
        )

    def _with(self, other: Batch, new: set[str]) -> BatchRef:
        return self._only(set(self.columns) - new).merge(other)

    def _same_column(self, name: str, other: BatchRef) -> bool:
        if name in self.near and name in other.near:
            return np.array_equal(self.near[name], other.near[name], equal_nan=self.near[name].dtype.kind == "f")
        if name not in self.far or name not in other.far:
            return False
        mine, theirs = self.far[name], other.far[name]
        same_parts = [id(p.ref) for p in mine.parts] == [id(p.ref) for p in theirs.parts]
        return same_parts and np.array_equal(_order(mine, len(self)), _order(theirs, len(self)))


def _rows_of(tokens: Tensor, lengths: np.ndarray, rows: np.ndarray) -> Tensor:
    """Return the tokens of some rows in this order; a view if the rows are contiguous."""
    starts = np.cumsum(lengths) - lengths
    first, count = starts[rows], lengths[rows]
    if len(first) and np.array_equal(first[1:], (first + count)[:-1]):
        return tokens[int(first[0]) : int(first[-1] + count[-1])]
    return tokens[torch.from_numpy(token_index(first, count))]


def _order(column: FarColumn, num_rows: int) -> np.ndarray:
    return np.arange(num_rows) if column.order is None else column.order
