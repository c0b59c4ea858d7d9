"""`Batch`: immutable rows of tokens, the type in which all data of a run travels.

Samples have different lengths and are concatenated without padding. Columns have one value per token or per row, or
hold Python objects; all are accessed by name. Every operation returns a new Batch. `rlcore.controller.ref.BatchRef`
has the same operations for columns in other processes.

Columns are held in plain mappings; `to_tensordict` and `from_tensordict` convert them. Only these import tensordict,
which imports torch's compiler: more than a second of CPU time in every process of a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rlcore.data.columns import STANDARD_COLUMNS
from rlcore.data.nested import columns_of, tensordict_of
from rlcore.data.shares import UNIT, balanced_order, run_sizes, token_index
from rlcore.data.wire import pack, unpack
from rlcore.errors import ColumnError, nearest

if TYPE_CHECKING:
    from tensordict import TensorDict

_NUMBERS = (int, float, np.integer, np.floating)
_TOKEN_COLUMNS = frozenset(column.name for column in STANDARD_COLUMNS if column.level == "token")


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """B samples with T tokens in total.

    Example:
        >>> batch = Batch.of(lengths=[2, 1], tokens={"input_ids": [5, 6, 7]}, rows={"reward": [0.5, 1.0]})
        >>> batch.take([1])["input_ids"]
        tensor([7])
    """

    row_columns: Mapping[str, Tensor]
    """[B, …]: one value per sample, such as `reward` or `prompt_id`."""
    token_columns: Mapping[str, Tensor]
    """[T, …]: one value per token, such as `input_ids` or `loss_mask`."""
    lengths: Tensor
    """[B] int64 on the CPU; sums to T."""
    objects: Mapping[str, np.ndarray]
    """[B] numpy arrays of Python objects: text, messages, other values of a dataset."""

    @classmethod
    def of(
        cls,
        *,
        lengths: Sequence[int] | np.ndarray | Tensor,
        tokens: Mapping[str, Any] | None = None,
        rows: Mapping[str, Any] | None = None,
    ) -> Batch:
        """Build a Batch from plain data; a row column that is not numeric is held as objects.

        Raises:
            ValueError: a column has the wrong length, or two columns have the same name.
        """
        lengths = torch.tensor(lengths) if isinstance(lengths, np.ndarray) else lengths
        lengths = torch.as_tensor(lengths, dtype=torch.int64, device="cpu")
        num_rows, num_tokens = len(lengths), int(lengths.sum())
        token_columns = {name: _tensor(value) for name, value in (tokens or {}).items()}
        row_columns: dict[str, Tensor] = {}
        objects: dict[str, np.ndarray] = {}
        for name, value in (rows or {}).items():
            column = _row_column(value)
            if isinstance(column, Tensor):
                row_columns[name] = column
            else:
                objects[name] = column
        _check_sizes(token_columns, num_tokens, "token")
        _check_sizes(row_columns, num_rows, "row")
        _check_sizes(objects, num_rows, "row")
        _check_unique([*token_columns, *row_columns, *objects])
        return cls(row_columns, token_columns, lengths, objects)

    @classmethod
    def from_tensordict(cls, source: TensorDict) -> Batch:
        """Build a Batch from a TensorDict of batch_size [B], whose nested tensors become token columns.

        Raises:
            ValueError: see `rlcore.data.nested.columns_of`.
        """
        lengths, tokens, rows, objects = columns_of(source)
        arrays = {name: object_array(values) for name, values in objects.items()}
        return cls.of(lengths=lengths, tokens=tokens, rows={**rows, **arrays})

    def to_tensordict(self) -> TensorDict:
        """Return a TensorDict of batch_size [B], sharing memory; token columns are nested tensors (torch.jagged)."""
        return tensordict_of(self.row_columns, self.token_columns, self.lengths, self.objects)

    def __len__(self) -> int:
        return len(self.lengths)

    def __repr__(self) -> str:
        return f"Batch({len(self)} rows, {self.num_tokens} tokens, columns: {', '.join(self.columns)})"

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def columns(self) -> list[str]:
        """Names of all columns: token columns, row columns, objects."""
        return [*self.token_columns, *self.row_columns, *self.objects]

    @property
    def device(self) -> torch.device:
        """Device of the columns; the lengths are always on the CPU."""
        for column in (*self.token_columns.values(), *self.row_columns.values()):
            return torch.device(column.device)
        return torch.device("cpu")

    def __contains__(self, name: object) -> bool:
        return name in self.token_columns or name in self.row_columns or name in self.objects

    def __getitem__(self, name: str) -> Any:
        """Return the column: a Tensor [T, …] or [B, …], or a numpy array [B] of objects.

        Raises:
            ColumnError: no such column; the message suggests the nearest name.
            TypeError: `name` is not a string; select rows with `take`.
        """
        if not isinstance(name, str):
            raise TypeError(f"batch[{name!r}]: columns are chosen by name; choose rows with batch.take([{name}])")
        for columns in (self.token_columns, self.row_columns, self.objects):
            if name in columns:
                return columns[name]
        raise ColumnError(missing_column(name, self.columns))

    def level(self, name: str) -> str:
        """Return "token", "row" or "object"."""
        if name not in self:
            raise ColumnError(missing_column(name, self.columns))
        if name in self.token_columns:
            return "token"
        return "object" if name in self.objects else "row"

    def fetch(self, *names: str) -> Any:
        """Return the named columns, several as a tuple, like `BatchRef.fetch`."""
        columns = tuple(self[name] for name in names)
        return columns[0] if len(columns) == 1 else columns

    def local(self) -> Batch:
        """Return itself; a BatchRef copies its columns into this process."""
        return self

    def offsets(self) -> Tensor:
        """Return [B + 1] int64: sample b is tokens[offsets[b]:offsets[b + 1]]."""
        return torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0))

    def select(self, *names: str) -> Batch:
        """Return only the named columns, in their current order.

        Raises:
            ColumnError: a name is not a column.
        """
        for name in names:
            self[name]
        return self._only(set(names))

    def drop(self, *names: str) -> Batch:
        """Return all columns except the named ones.

        Raises:
            ColumnError: a name is not a column.
        """
        for name in names:
            self[name]
        return self._only(set(self.columns) - set(names))

    def rename(self, **names: str) -> Batch:
        """Rename columns: `rename(log_probs="old_log_probs")`.

        Raises:
            ColumnError: an old name is not a column.
            ValueError: a new name is already a column.
        """
        for old in names:
            self[old]
        _check_unique([names.get(name, name) for name in self.columns])
        return Batch(
            {names.get(k, k): v for k, v in self.row_columns.items()},
            {names.get(k, k): v for k, v in self.token_columns.items()},
            self.lengths,
            {names.get(k, k): v for k, v in self.objects.items()},
        )

    def with_rows(self, **columns: Any) -> Batch:
        """Add or replace columns with one value per row."""
        return self._with(Batch.of(lengths=self.lengths, tokens={}, rows=columns) if columns else self, set(columns))

    def with_tokens(self, **columns: Any) -> Batch:
        """Add or replace columns with one value per token."""
        return self._with(Batch.of(lengths=self.lengths, tokens=columns), set(columns))

    def merge(self, other: Batch) -> Batch:
        """Return the columns of both batches, which must have the same rows.

        Raises:
            ValueError: the rows differ, or a column of both has different values (NaN equals NaN).
        """
        if not isinstance(other, Batch):
            raise TypeError(f"merge takes a Batch, got {type(other).__name__}")
        if len(other) != len(self) or (other.token_columns and not torch.equal(self.lengths, other.lengths)):
            raise ValueError(f"merge needs the same rows: {self!r} and {other!r} have other lengths")
        for name in other.columns:
            if name in self and not (self.level(name) == other.level(name) and _equal(self[name], other[name])):
                raise ValueError(f"column '{name}' is in both batches with other values or levels; drop or rename one")
        return self._with(other, set())

    def __or__(self, other: Batch) -> Batch:
        return self.merge(other)

    def take(self, index: Sequence[int] | np.ndarray | Tensor) -> Batch:
        """Return the rows at `index` ([N] integers or [B] booleans) in that order; repeats are allowed.

        Raises:
            IndexError: an index outside the batch.
        """
        rows = row_index(index, len(self))
        lengths = self.lengths[rows]
        device = self.device
        where = torch.from_numpy(token_index(self.offsets()[:-1][rows].numpy(), lengths.numpy())).to(device)
        on_device = rows.to(device)
        return Batch(
            {k: v[on_device] for k, v in self.row_columns.items()},
            {k: v[where] for k, v in self.token_columns.items()},
            lengths,
            {k: v[rows.numpy()] for k, v in self.objects.items()},
        )

    def slice(self, start: int, stop: int) -> Batch:
        """Return rows start:stop, as views of the same memory.

        Raises:
            IndexError: unless 0 <= start <= stop <= rows.
        """
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"rows {start}:{stop} of a batch with {len(self)} rows")
        offsets = self.offsets()
        first, last = int(offsets[start]), int(offsets[stop])
        return Batch(
            {k: v[start:stop] for k, v in self.row_columns.items()},
            {k: v[first:last] for k, v in self.token_columns.items()},
            self.lengths[start:stop],
            {k: v[start:stop] for k, v in self.objects.items()},
        )

    def split(self, sizes: Sequence[int]) -> list[Batch]:
        """Split into consecutive parts with these numbers of rows; a part may be empty.

        Raises:
            ValueError: the sizes do not sum to the number of rows.
        """
        bounds = split_bounds(sizes, len(self))
        return [self.slice(start, stop) for start, stop in bounds]

    def repeat(self, n: int) -> Batch:
        """Repeat each row n times, with copies adjacent: a, a, b, b."""
        return self.take(torch.arange(len(self)).repeat_interleave(n))

    @staticmethod
    def cat(batches: Iterable[Batch]) -> Batch:
        """Concatenate batches; all must have the same columns.

        Raises:
            ValueError: no batches, or the columns differ (the message names them).
        """
        batches = list(batches)
        if not batches:
            raise ValueError("cat needs at least one batch")
        first = batches[0]
        for other in batches[1:]:
            check_same_columns(first.columns, other.columns)
        batches = [batch for batch in batches if len(batch)] or [first]  # the dtypes of empty batches may differ
        first = batches[0]
        return Batch(
            {k: torch.cat([b.row_columns[k] for b in batches]) for k in first.row_columns},
            {k: torch.cat([b.token_columns[k] for b in batches]) for k in first.token_columns},
            torch.cat([b.lengths for b in batches]),
            {k: np.concatenate([b.objects[k] for b in batches]) for k in first.objects},
        )

    def balance(self, num_parts: int) -> Batch:
        """Reorder rows so that `num_parts` shares have about the same number of tokens, each with whole units."""
        return self.take(balanced_order(self.lengths.numpy(), num_parts, self.unit_sizes()))

    def per_token(self, name: str) -> Tensor:
        """Return a row column expanded to the tokens of its rows, [T]; a token column unchanged."""
        column: Tensor = self[name]
        if self.level(name) == "token":
            return column
        return column.repeat_interleave(self.lengths.to(column.device), dim=0, output_size=self.num_tokens)

    def per_row(self, values: Tensor) -> Tensor:
        """Sum a [T] tensor over each row, [B]."""
        row = torch.arange(len(self), device=values.device)
        row = row.repeat_interleave(self.lengths.to(values.device), output_size=self.num_tokens)
        return torch.zeros(len(self), dtype=values.dtype, device=values.device).index_add_(0, row, values)

    def unit_sizes(self) -> np.ndarray:
        """Return the number of rows of each unit, [U] int64; without the row column `unit_id` every row is a unit.

        Raises:
            ValueError: the rows of a unit are not adjacent.
        """
        return run_sizes(self[UNIT].cpu().numpy(), UNIT) if UNIT in self else np.ones(len(self), dtype=np.int64)

    def per_unit(self, values: Tensor) -> Tensor:
        """Sum a [B] tensor over each unit, [U]."""
        sizes = torch.from_numpy(self.unit_sizes()).to(values.device)
        unit = torch.arange(len(sizes), device=values.device).repeat_interleave(sizes, output_size=len(self))
        return torch.zeros(len(sizes), dtype=values.dtype, device=values.device).index_add_(0, unit, values)

    def to(self, device: torch.device | str) -> Batch:
        """Move the columns to another device; objects and lengths stay on the CPU."""
        return Batch(
            {k: v.to(device) for k, v in self.row_columns.items()},
            {k: v.to(device) for k, v in self.token_columns.items()},
            self.lengths,
            self.objects,
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = {
            "lengths": pack(self.lengths, protocol),
            "rows": {name: pack(column, protocol) for name, column in self.row_columns.items()},
            "tokens": {name: pack(column, protocol) for name, column in self.token_columns.items()},
            "objects": {name: list(column) for name, column in self.objects.items()},
        }
        return _rebuild, (plain,)

    def _only(self, names: set[str]) -> Batch:
        return Batch(
            {k: v for k, v in self.row_columns.items() if k in names},
            {k: v for k, v in self.token_columns.items() if k in names},
            self.lengths,
            {k: self.objects[k] for k in self.objects if k in names},
        )

    def _with(self, other: Batch, replace: set[str]) -> Batch:
        """Return the columns of this batch without `replace`, then those of `other`."""
        kept = self._only(set(self.columns) - replace)
        return Batch(
            {**kept.row_columns, **other.row_columns},
            {**kept.token_columns, **other.token_columns},
            self.lengths,
            {**kept.objects, **other.objects},
        )


def missing_column(name: str, columns: Sequence[str]) -> str:
    """Return the message for a missing column."""
    match = nearest(name, list(columns))
    hint = f" Did you mean '{match}'?" if match else ""
    return f"no column '{name}'.{hint} Columns: {', '.join(columns) or 'none'}"


def check_same_columns(first: Sequence[str], other: Sequence[str]) -> None:
    """Raise a ValueError that names the columns, unless both lists have the same names."""
    if set(first) != set(other):
        odd = ", ".join(sorted(set(first) ^ set(other)))
        raise ValueError(f"batches with different columns cannot be joined; only in one of them: {odd}")


def row_index(index: Sequence[int] | np.ndarray | Tensor, num_rows: int) -> Tensor:
    """Return [N] int64 row numbers for integers or a boolean mask; negative numbers count from the end."""
    rows = torch.as_tensor(np.asarray(index) if not isinstance(index, Tensor) else index)
    if rows.dtype == torch.bool:
        if rows.shape != (num_rows,):
            raise IndexError(f"a mask of {tuple(rows.shape)} for {num_rows} rows")
        return rows.cpu().nonzero().squeeze(1)
    if rows.numel() == 0:
        return torch.zeros(0, dtype=torch.int64)
    if rows.is_floating_point() or rows.dim() != 1:
        raise IndexError(
            f"rows are chosen by a list of integers or a mask, got {rows.dtype} of shape {tuple(rows.shape)}"
        )
    rows = rows.to(torch.int64).cpu()
    if int(rows.max()) >= num_rows or int(rows.min()) < -num_rows:
        wrong = int(rows.max()) if int(rows.max()) >= num_rows else int(rows.min())
        raise IndexError(f"row {wrong} of a batch with {num_rows} rows")
    return torch.where(rows < 0, rows + num_rows, rows)


def split_bounds(sizes: Sequence[int], num_rows: int) -> list[tuple[int, int]]:
    """Return (start, stop) of consecutive parts."""
    if sum(sizes) != num_rows or any(size < 0 for size in sizes):
        raise ValueError(f"sizes {list(sizes)} do not sum to {num_rows} rows")
    stops = np.cumsum(sizes)
    return [(int(stop) - size, int(stop)) for stop, size in zip(stops, sizes)]


def _tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value))


def _row_column(value: Any) -> Tensor | np.ndarray:
    """Return a tensor if the values are numbers, else an array of objects."""
    if isinstance(value, Tensor):
        return value
    if not isinstance(value, np.ndarray):
        value = list(value)
        if value and all(isinstance(v, bool) for v in value):
            return torch.tensor(value)
        if value and all(isinstance(v, _NUMBERS) and not isinstance(v, bool) for v in value):
            wide = any(isinstance(v, (float, np.floating)) for v in value)
            return torch.tensor(value, dtype=torch.float32 if wide else torch.int64)
        return object_array(value)
    return value if value.dtype == object else _tensor(value) if value.dtype.kind in "biuf" else value.astype(object)


def object_array(values: Sequence[Any]) -> np.ndarray:
    """Return the values, including lists, as an object array [N]."""
    array = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):  # slice assignment would unpack nested lists
        array[i] = value
    return array


def _check_sizes(columns: Mapping[str, Any], size: int, level: str) -> None:
    for name, column in columns.items():
        if len(column) != size:
            raise ValueError(f"{level} column '{name}' has {len(column)} values for {size} {level}s")


def _check_unique(names: Sequence[str]) -> None:
    twice = sorted({name for name in names if list(names).count(name) > 1})
    if twice:
        raise ValueError(f"two columns named '{twice[0]}'; rename one")


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        same = a == b
        if a.is_floating_point():
            same |= a.isnan() & b.isnan()
        return bool(same.all())
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return len(a) == len(b) and all(x is y or x == y or (x != x and y != y) for x, y in zip(a, b))
    return False


def _rebuild(plain: dict[str, Any]) -> Batch:
    return Batch.of(
        lengths=unpack(plain["lengths"]),
        tokens={name: unpack(column) for name, column in plain["tokens"].items()},
        rows={name: unpack(column) for name, column in plain["rows"].items()}
        | {name: object_array(values) for name, values in plain["objects"].items()},
    )
