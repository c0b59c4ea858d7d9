"""Formation of units: the rows that the loss of an algorithm compares."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rlcore.data.shares import UNIT, run_sizes, starts_of
from rlcore.errors import ColumnError, did_you_mean

if TYPE_CHECKING:
    from rlcore.data.batch import Batch
    from rlcore.protocols.algorithm import Unit


def whole_units(samples: Batch, unit: Unit) -> tuple[Batch, int]:
    """Return the complete units, with the column `unit_id`, and the number of incomplete units that were left out.

    Raises:
        ColumnError: the column of the unit is missing or does not hold integers.
        ValueError: the rows of a unit are not adjacent, or a unit has more than `unit.size` rows.
    """
    column, unit_id = unit.column, _unit_id(samples, unit.column)
    sizes = run_sizes(unit_id.numpy(), column)
    if unit.size and sizes.max(initial=0) > unit.size:
        largest = sizes.argmax()
        raise ValueError(
            f"{sizes[largest]} rows have {column}={unit_id[starts_of(sizes)[largest]]}, but a unit has size={unit.size}\n"
            f"In collect, take {unit.size} rows of each unit, or declare  Unit(column='{column}')  for any size."
        )
    samples = samples.with_rows(**{UNIT: unit_id})
    complete = sizes == unit.size if unit.size else np.ones(len(sizes), dtype=bool)
    if complete.all():
        return samples, 0
    return samples.take(np.repeat(complete, sizes)), int((~complete).sum())


def _unit_id(samples: Batch, column: str) -> Tensor:
    """Return the column that the rows of a unit share, [B] int64."""
    if not len(samples) and column in samples:  # an empty list has no element type
        return torch.zeros(0, dtype=torch.int64)
    if column not in samples or samples.level(column) != "row" or samples.fetch(column).dtype != torch.int64:
        what = "is not a row column of int64" if column in samples else "does not exist"
        raise ColumnError(
            f"unit column '{column}' {what}.{did_you_mean(column, samples.columns)}\n"
            f"Add it in collect:  samples.with_rows({column}=…)"
        )
    unit_id: Tensor = samples.fetch(column)
    return unit_id
