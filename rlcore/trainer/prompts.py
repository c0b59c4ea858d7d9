"""The prompts of a run as one Batch, loaded, tokenized and checked before anything else starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlcore.config.schema import Config
from rlcore.data.batch import Batch, object_array
from rlcore.data.columns import RESERVED_COLUMNS
from rlcore.data.prompts import PromptBuilder
from rlcore.data.text import unencodable
from rlcore.errors import ConfigError, did_you_mean
from rlcore.models.load import load_tokenizer
from rlcore.registry import resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """All prompts of one dataset; row i of the batch is prompt i."""

    name: str
    batch: Batch
    """`input_ids`, `prompt_id`, `prompt` and the columns of the dataset."""
    dropped: int
    truncated: int
    fingerprint: str
    """Hash of all tokens; resuming with different prompts is refused."""
    columns: Mapping[str, str]
    """Column -> hash of its values; resuming with changed columns is refused."""


def load_prompts(config: Config, path: str, writes: Sequence[str] = (), responses: Sequence[str] = ()) -> Prompts:
    """Open a dataset by its registered name and build its prompts.

    Args:
        writes: columns that the algorithm writes, so the data must not have them.
        responses: columns of the data that the algorithm learns from.
    """
    dataset_class: Any = resolve("dataset", config.data.dataset).object
    dataset = dataset_class(path, config.data)
    builder = PromptBuilder(
        load_tokenizer(config.model.path),
        config.data,
        reserved=RESERVED_COLUMNS.union(writes),
        responses=responses,
    )
    prepared = builder.prepare(dataset)
    rows: dict[str, Any] = {name: object_array(values) for name, values in prepared.rows.items()}
    batch = Batch.of(
        lengths=prepared.lengths,
        tokens={"input_ids": prepared.token_ids},
        rows=rows | {"prompt_id": np.arange(len(prepared))},
    )
    return Prompts(
        name=dataset.name,
        batch=batch,
        dropped=prepared.counts["overlong_dropped"],
        truncated=prepared.counts["overlong_truncated"],
        fingerprint=prepared.fingerprint(),
        columns=prepared.column_fingerprints(),
    )


def check_demonstrations(algorithm: str, columns: Sequence[str], data: Prompts) -> None:
    """Check that every column that an algorithm reads as responses is in the dataset and holds text."""
    for name in columns:
        if name not in data.batch:
            known = [column for column in data.batch.columns if data.batch.level(column) == "object"]
            raise ConfigError(
                f"algorithm '{algorithm}' learns from column '{name}', which {data.name} does not have."
                f"{did_you_mean(name, known)}\nIt has: {', '.join(known)}. Rename one:  'data.rename={{COLUMN: {name}}}'"
            )
        values = data.batch[name]
        bad = next((i for i, value in enumerate(values) if not isinstance(value, str) or unencodable(value)), None)
        if bad is not None:
            raise ConfigError(
                f"{data.name}: column '{name}' of prompt {bad} is {values[bad]!r}, but algorithm '{algorithm}'"
                " needs text, or messages that end with the assistant's\nFill it in, or remove the row."
            )
