"""Averaging of loss terms to a loss, for all algorithms.

Counts are those of the whole mini-batch over all ranks. So the sum over micro-batches, and with it the gradient, does
not depend on how the mini-batch is split: micro-batch size, data-parallel size, packing.
Shapes: B rows, T tokens of the current micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlcore.data.batch import Batch
from rlcore.types import Counts, LossTerms, Mean, Metrics


def count(num_loss_tokens: Tensor) -> Counts:
    """Return the counts of a mini-batch, given the number of loss tokens of each row."""
    return Counts(rows=int((num_loss_tokens > 0).sum()), tokens=int(num_loss_tokens.sum()))


def reduce_terms(terms: LossTerms, batch: Batch, counts: Counts) -> Tensor:
    """Return this micro-batch's part of the averaged loss, a scalar.

    Finite terms outside `loss_mask`, and of rows without loss tokens, affect neither value nor gradient.

    Raises:
        ValueError: the terms have a wrong shape, or the average is unknown.
    """
    if not isinstance(terms, LossTerms):
        raise TypeError(f"the loss returned a {type(terms).__name__}; return rlcore.LossTerms(terms=…)")
    if terms.average == "row-mean":
        _check_shape(terms.terms, len(batch), "one term per row", terms.average)
        seen = batch.per_row(batch["loss_mask"].long()) > 0
        return torch.where(seen, terms.terms, torch.zeros_like(terms.terms)).sum() / max(1, counts.rows)
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
    raise ValueError(
        f"average '{terms.average}' is not one of token-mean, seq-mean-token-mean, seq-mean-token-sum, row-mean"
    )


def reduce_metrics(metrics: Mapping[str, Tensor], batch: Batch) -> Metrics:
    """Return means over loss tokens ([T] tensors) or rows ([B] tensors), to be merged with other micro-batches."""
    mask = batch["loss_mask"]
    reduced: Metrics = {}
    for name, tensor in metrics.items():
        values = tensor.detach()
        if len(values) == batch.num_tokens and values.dim() == 1:
            kept = values[mask]
            reduced[name] = Mean(float(kept.double().sum()), float(len(kept)))
        elif len(values) == len(batch):
            reduced[name] = Mean(float(values.double().sum()), float(len(batch)))
        else:
            raise ValueError(f"metric '{name}' has shape {tuple(values.shape)}; give one value per token or per row")
    return reduced


def _check_shape(terms: Tensor, size: int, what: str, average: str) -> None:
    if terms.dim() != 1 or len(terms) != size:
        raise ValueError(f"average={average} needs {what}, [{size}]; the loss returned {tuple(terms.shape)}")
