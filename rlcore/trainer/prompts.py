"""The prompts of a run as one Batch, loaded, tokenized and checked before anything else starts."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlcore.config.schema import Config
from rlcore.data.batch import Batch, object_array
from rlcore.data.columns import RESERVED_COLUMNS
from rlcore.data.fingerprints import fingerprint_of
from rlcore.data.prompts import PromptBuilder
from rlcore.data.text import unencodable
from rlcore.errors import ConfigError, did_you_mean
from rlcore.models.load import load_tokenizer
from rlcore.registry import resolve

logger = logging.getLogger(__name__)


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
    sets: Mapping[str, int] = field(default_factory=dict)
    """Name -> number of prompts of each data set, in order; empty: there is one, without a name."""


def load_prompts(
    config: Config, path: str, writes: Sequence[str] = (), responses: Sequence[str] = (), every_turn: bool = False
) -> Prompts:
    """Open a dataset by its registered name and build its prompts.

    Args:
        writes: columns that the algorithm writes, so the data must not have them.
        responses: columns of the data that the algorithm learns from.
        every_turn: it learns every message of the assistant in a conversation, not only the last.
    """
    dataset_class: Any = resolve("dataset", config.data.dataset).object
    dataset = dataset_class(path, config.data)
    builder = PromptBuilder(
        load_tokenizer(config.model.path),
        config.data,
        reserved=RESERVED_COLUMNS.union(writes),
        responses=responses,
        every_turn=every_turn,
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


def named(source: str | Mapping[str, str]) -> Mapping[str, str]:
    """Return name -> path of each data set; a single one has the name ""."""
    if isinstance(source, str):
        return {"": source} if source else {}
    return source


def load_sets(
    config: Config, source: str | Mapping[str, str], writes: Sequence[str], responses: Sequence[str], every_turn: bool
) -> dict[str, Prompts]:
    """Load each data set of a setting; the arguments are those of `load_prompts`."""
    return {name: load_prompts(config, path, writes, responses, every_turn) for name, path in named(source).items()}


def join(parts: Mapping[str, Prompts]) -> Prompts:
    """Return the prompts of all data sets in order; a column that a set lacks is None there."""
    if "" in parts:
        return parts[""]
    names = dict.fromkeys(name for part in parts.values() for name in part.batch.columns)
    batches = []
    for part in parts.values():
        absent = [name for name in names if name not in part.batch]
        batches.append(part.batch.with_rows(**{name: object_array([None] * len(part.batch)) for name in absent}))
    batch = Batch.cat(batch.select(*names) for batch in batches)
    return Prompts(
        name=", ".join(f"{name}={part.name}" for name, part in parts.items()),
        batch=batch.with_rows(prompt_id=np.arange(len(batch))),
        dropped=sum(part.dropped for part in parts.values()),
        truncated=sum(part.truncated for part in parts.values()),
        fingerprint=fingerprint_of([[name, part.fingerprint] for name, part in parts.items()]),
        columns={name: fingerprint_of([part.columns.get(name) for part in parts.values()]) for name in names},
        sets={name: len(part.batch) for name, part in parts.items()},
    )


def warn_repeats(config: Config, prompts: Prompts) -> None:
    """Warn about steps that need more prompts than there are."""
    if config.trainer.prompts_per_step > len(prompts.batch):
        logger.warning(
            "trainer.prompts_per_step=%d is more than the %d prompts of %s, so each step repeats some; type  %s",
            *(config.trainer.prompts_per_step, len(prompts.batch), prompts.name),
            f"trainer.prompts_per_step={len(prompts.batch)}",
        )
    for name, weight in config.data.weights.items():
        count = config.trainer.prompts_per_step * weight / sum(config.data.weights.values())
        if count > prompts.sets[name]:
            logger.warning(
                "each step takes %.4g prompts from %s, which has %d, so it repeats some; lower  data.weights.%s",
                *(count, name, prompts.sets[name], name),
            )


def check_demonstrations(algorithm: str, columns: Sequence[str], data: Prompts, labels: Sequence[str] = ()) -> None:
    """Check that the columns that an algorithm learns from are in the dataset, with texts, or true or false in labels."""
    texts = [(name, _is_text, "text, or messages that end with the assistant's") for name in columns]
    for name, fits, needed in [*texts, *((name, _is_label, "true or false") for name in labels)]:
        if name not in data.batch:
            known = [column for column in data.batch.columns if data.batch.level(column) == "object"]
            raise ConfigError(
                f"algorithm '{algorithm}' learns from column '{name}', which {data.name} does not have."
                f"{did_you_mean(name, known)}\nIt has: {', '.join(known)}. Rename one:  'data.rename={{COLUMN: {name}}}'"
            )
        values = data.batch[name]
        bad = next((i for i, value in enumerate(values) if not fits(value)), None)
        if bad is not None:
            raise ConfigError(
                f"{data.name}: column '{name}' of prompt {bad} is {values[bad]!r}, but algorithm '{algorithm}'"
                f" needs {needed}\nFill it in, or remove the row."
            )


def _is_label(value: Any) -> bool:
    """Return whether a value is true or false."""
    return isinstance(value, int | np.bool_) and value in (0, 1)


def _is_text(value: Any) -> bool:
    """Return whether a value is a text, or the texts of several turns."""
    texts = value if isinstance(value, tuple) else [value]
    return bool(texts) and all(isinstance(text, str) and not unencodable(text) for text in texts)
