"""Columns of a batch as a TensorDict, and back.

A TensorDict [B] holds token columns as nested tensors (layout torch.jagged, one offsets tensor for all of them, so that
they can be added and multiplied), row columns as tensors, objects as a NonTensorStack, and the lengths as `num_tokens`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from tensordict import TensorDict

LENGTHS = "num_tokens"
"""Entry with the number of tokens of each row, [B] int64."""


def tensordict_of(
    rows: Mapping[str, Tensor], tokens: Mapping[str, Tensor], lengths: Tensor, objects: Mapping[str, np.ndarray]
) -> TensorDict:
    """Return the columns as a TensorDict of batch_size [B]; tensors share memory with it."""
    from tensordict import NonTensorData, NonTensorStack, TensorDict

    entries: dict[str, Any] = dict(rows)
    offsets: dict[torch.device, Tensor] = {}
    for name, column in tokens.items():
        if column.device not in offsets:
            offsets[column.device] = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(column.device)
        entries[name] = torch.nested.nested_tensor_from_jagged(column, offsets[column.device])
    for name, values in objects.items():
        entries[name] = NonTensorStack(*[NonTensorData(value) for value in values])
    return TensorDict({**entries, LENGTHS: lengths}, batch_size=[len(lengths)])


def columns_of(source: TensorDict) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor], dict[str, list[Any]]]:
    """Return lengths, token columns, row columns and objects of a TensorDict [B]; its nested tensors are token columns.

    Raises:
        ValueError: it has another batch_size, a TensorDict inside, neither nested tensors nor `num_tokens`, or nested
            tensors of different lengths.
    """
    if len(source.batch_size) != 1:
        raise ValueError(f"a batch has rows: expected a batch_size like [8], got {list(source.batch_size)}")
    found: dict[str, Tensor] = {}
    tokens: dict[str, Tensor] = {}
    rows: dict[str, Tensor] = {}
    objects: dict[str, list[Any]] = {}
    for name in source.keys():  # noqa: SIM118 - iteration yields rows
        value = source.get(name)
        if not isinstance(value, Tensor):
            objects[name] = _objects(name, value)
        elif value.is_nested:
            found[name], tokens[name] = _ragged(name, value)
        else:
            rows[name] = value
    if LENGTHS in rows:
        found[LENGTHS] = rows.pop(LENGTHS).cpu()
    if not found:
        raise ValueError(f"the rows have no lengths\nAdd a nested tensor, or an entry '{LENGTHS}' with them.")
    first, *others = found
    for name in others:
        if found[name].tolist() != found[first].tolist():
            raise ValueError(f"'{first}' and '{name}' have different numbers of tokens in a row\nSplit them first.")
    return found[first], tokens, rows, objects


def _ragged(name: str, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return lengths [B] and values [T, …]; nested tensors of both layouts are accepted."""
    if value.layout is torch.jagged:
        whole: Any = value.contiguous()
        lengths, values = whole.offsets().diff(), whole.values()
    else:
        parts = value.unbind()
        lengths, values = torch.tensor([len(part) for part in parts], dtype=torch.int64), torch.cat(parts)
    if len(values) != int(lengths.sum()):
        raise ValueError(f"'{name}' is not nested along its second dimension\nTranspose it.")
    return lengths.cpu(), values


def _objects(name: str, value: Any) -> list[Any]:
    from tensordict import is_non_tensor

    if not is_non_tensor(value):
        raise ValueError(f"'{name}' is a {type(value).__name__}\nType  td.flatten_keys('.')  to get columns.")
    return list(value.tolist())
