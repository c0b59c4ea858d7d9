"""Averaging of loss terms to a loss, for all algorithms.

Counts are those of the whole mini-batch over all ranks. So the sum over micro-batches, and with it the gradient, does
not depend on how the mini-batch is split: micro-batch size, data-parallel size, packing.
Shapes: B rows, U units, T tokens of the current micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from rlcore.data.batch import Batch
from rlcore.data.shares import unit_sums
from rlcore.types import Average, Counts, LossTerms, Mean, Metrics


def count(num_loss_tokens: Tensor, sizes: np.ndarray | None = None) -> Counts:
    """Return the counts of a mini-batch, given the loss tokens of each row, [B], and the rows of each unit, [U].

    Without `sizes` every row is a unit.
    """
    rows = int((num_loss_tokens > 0).sum())
    units = rows if sizes is None else int((unit_sums(num_loss_tokens.numpy(), sizes) > 0).sum())
    return Counts(rows=rows, tokens=int(num_loss_tokens.sum()), units=units)


def reduce_terms(terms: LossTerms, batch: Batch, counts: Counts) -> Tensor:
    """Return this micro-batch's part of the averaged loss, a scalar.

    Finite terms outside `loss_mask`, and of rows and units without loss tokens, affect neither value nor gradient.

    Raises:
        ValueError: the terms have a wrong shape, the average is unknown, or the rows of a unit are not adjacent.
    """
    if not isinstance(terms, LossTerms):
        raise TypeError(f"the loss returned a {type(terms).__name__}; return rlcore.LossTerms(terms=…)")
    if terms.average in ("row-mean", "unit-mean"):
        seen, what, num = batch.per_row(batch["loss_mask"].long()), "row", counts.rows
        if terms.average == "unit-mean":
            seen, what, num = batch.per_unit(seen), "unit", counts.units
        _check_shape(terms.terms, len(seen), f"one term per {what}", terms.average)
        return torch.where(seen > 0, terms.terms, torch.zeros_like(terms.terms)).sum() / max(1, num)
    _check_shape(terms.terms, batch.num_tokens, "one term per token", terms.average)
    mask = batch["loss_mask"]
    kept = torch.where(mask, terms.terms, torch.zeros_like(terms.terms))
    if terms.average == "token-mean":
        return kept.sum() / max(1, counts.tokens)
    if terms.average == "seq-mean-token-sum":
        return kept.sum() / max(1, counts.rows)
    if terms.average == "seq-mean-token-mean":
        per_row = batch.per_row(mask.to(kept.dtype)).clamp(min=1)
        return (batch.per_row(kept) / per_row).sum() / max(1, counts.rows)
    raise ValueError(f"average '{terms.average}' is not one of {', '.join(get_args(Average))}")


def reduce_metrics(metrics: Mapping[str, Tensor], batch: Batch) -> Metrics:
    """Return means over loss tokens ([T] tensors), rows ([B]) or units ([U]), to be merged with other micro-batches."""
    mask = batch["loss_mask"]
    num_units = len(batch.unit_sizes())
    reduced: Metrics = {}
    for name, tensor in metrics.items():
        values = tensor.detach()
        if len(values) == batch.num_tokens and values.dim() == 1:
            values = values[mask]
        elif len(values) not in (len(batch), num_units):
            raise ValueError(
                f"metric '{name}' has shape {tuple(values.shape)}; give one value per token, per row or per unit"
            )
        reduced[name] = Mean(float(values.double().sum()), float(len(values)))
    return reduced


def _check_shape(terms: Tensor, size: int, what: str, average: str) -> None:
    if terms.dim() != 1 or len(terms) != size:
        raise ValueError(f"average={average} needs {what}, [{size}]; the loss returned {tuple(terms.shape)}")
