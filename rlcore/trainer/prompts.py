"""The prompts of a run as one Batch: opened, tokenised and checked before anything else starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rlcore.config.schema import Config
from rlcore.data.batch import Batch, object_array
from rlcore.data.prompts import PromptBuilder
from rlcore.models.load import load_tokenizer
from rlcore.registry import resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """All prompts of one data set; row i of the batch is prompt i."""

    name: str
    batch: Batch
    """`input_ids`, `prompt_id`, `prompt` and the columns of the data set."""
    dropped: int
    truncated: int
    fingerprint: str
    """Changes with any token; a resume over other prompts is refused."""


def load_prompts(config: Config, path: str) -> Prompts:
    """Open a data set by its registered name and make its prompts."""
    dataset_class: Any = resolve("dataset", config.data.dataset).object
    dataset = dataset_class(path, config.data)
    prepared = PromptBuilder(load_tokenizer(config.model.path), config.data).prepare(dataset)
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
    )
