"""The hooks `report`: whole groups with their tokens, evaluation samples, and the distributions of all samples.

rlcore train … plugins.hooks=[report] trackers=[console,jsonl,report]

RUN/report/samples.jsonl         a few groups of each step, chosen by reward, and held-out samples
RUN/report/distributions.jsonl   histograms of all samples of each step
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

import rlcore
from rlcore.hooks import RunView
from rlcore_report.bounded import BoundedFile
from rlcore_report.histogram import summary_of

SAMPLE_BYTES = 100_000_000
DISTRIBUTION_BYTES = 10_000_000
GROUPS = 4
"""Maximum number of groups recorded per step."""
GROUP_SIZE = 16
"""Samples recorded of a group, the best and the worst among them."""
EVAL_PROMPTS = 128
"""Held-out samples recorded per evaluation, the same prompts each time."""
MOST_TOKENS = 1_000
"""Maximum number of recorded tokens of a response."""
MOST_TEXT = 8_000
"""Maximum number of recorded characters of a text."""

_HIDDEN = frozenset({"seed", "group_id", "truncated", "num_loss_tokens", "reward_status", "reward_has_note"})
_OWN = frozenset({"prompt", "completion", "reward", "prompt_id", "sample_id", "finish_reason", "reward_note"})
_PART = "reward:"


class Recorder:
    """Hooks that record what the report shows in addition to metrics.jsonl and samples.jsonl."""

    def __init__(self) -> None:
        self._samples: BoundedFile | None = None
        self._distributions: BoundedFile | None = None
        self._tokenizer: Any = None
        self._texts: dict[int, str] = {}

    @rlcore.hookimpl
    def rlcore_run_start(self, run: RunView) -> None:
        from rlcore.models.load import load_tokenizer

        total, append = run.config.trainer.steps, run.counters.step > 0
        directory = run.directory / "report"
        self._samples = BoundedFile(directory / "samples.jsonl", SAMPLE_BYTES, total, append=append)
        self._distributions = BoundedFile(directory / "distributions.jsonl", DISTRIBUTION_BYTES, total, append=append)
        self._tokenizer = load_tokenizer(run.config.model.path)

    @rlcore.hookimpl
    def rlcore_samples_scored(self, run: RunView, step: int, samples: Any) -> None:
        """Record the distributions of a step and some of its groups."""
        reward, group_id, length, version = (
            column.numpy() for column in samples.fetch("reward", "group_id", "num_loss_tokens", "policy_version")
        )
        measured = {"reward": reward, "length": length, "lag": step - 1 - version}
        line = {name: found for name, values in measured.items() if (found := summary_of(values))}
        assert self._distributions is not None, "the run has started"
        self._distributions.write(step, [{"step": step, **line}])
        rows = [row for group in chosen_groups(reward, group_id, step) for row in group]
        self._record(step, samples.take(rows), kind="training")

    @rlcore.hookimpl
    def rlcore_evaluated(self, run: RunView, step: int, samples: Any) -> None:
        """Record held-out samples: of the same prompts in every evaluation."""
        if {"reward", "completion"} <= set(samples.columns):  # an algorithm's own evaluation may return other rows
            count = min(len(samples), EVAL_PROMPTS)
            self._record(step, samples.take([i * len(samples) // count for i in range(count)]), kind="evaluation")

    @rlcore.hookimpl
    def rlcore_run_end(self, run: RunView, error: BaseException | None) -> None:
        for file in (self._samples, self._distributions):
            if file is not None:
                file.close()

    def _record(self, step: int, samples: Any, *, kind: str) -> None:
        assert self._samples is not None, "the run has started"
        batch = samples.local()
        levels = {name: batch.level(name) for name in batch.columns}
        columns = {name: batch[name].tolist() for name, level in levels.items() if level != "token"}
        tokens = self._tokens(batch) if kind == "training" else [None] * len(batch)
        rows = ({name: values[i] for name, values in columns.items()} for i in range(len(batch)))
        self._samples.write(step, (sample(step, kind, row, more) for row, more in zip(rows, tokens)))

    def _tokens(self, batch: Any) -> Iterator[dict[str, Any] | None]:
        """Yield the tokens of each response, from the first one that is learned from."""
        ids, mask, log_probs = batch["input_ids"], batch["loss_mask"], batch["rollout_log_probs"]
        for begin, end in pairwise(batch.offsets().tolist()):
            learned = mask[begin:end].nonzero()
            first = begin + int(learned[0]) if len(learned) else end
            part = slice(first, min(end, first + MOST_TOKENS))
            yield {
                "text": [self._text(token) for token in ids[part].tolist()],
                "log_prob": [round(value, 3) for value in log_probs[part].tolist()],
                "mask": mask[part].int().tolist(),
            }

    def _text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = self._tokenizer.decode([token])
        return self._texts[token]


def chosen_groups(reward: np.ndarray, group_id: np.ndarray, step: int) -> list[list[int]]:
    """Return the rows of up to GROUPS groups: the one with the most variance, the best, the worst, and one by turns."""
    scored = ~np.isnan(reward)
    if not scored.any():
        return []
    ids, group = np.unique(group_id[scored], return_inverse=True)
    values, counts = reward[scored].astype(np.float64), np.bincount(group)
    means = np.bincount(group, values) / counts
    spreads = np.bincount(group, (values - means[group]) ** 2) / counts
    wanted = [int(np.argmax(spreads)), int(np.argmax(means)), int(np.argmin(means)), step % len(ids)]
    chosen = list(dict.fromkeys(wanted))[:GROUPS]
    return [_extremes(np.flatnonzero(group_id == ids[i]), reward) for i in chosen]


def _extremes(group: np.ndarray, reward: np.ndarray) -> list[int]:
    """Return the rows of a group in their order; of a large group, the best and the worst rows in equal number."""
    if len(group) <= GROUP_SIZE:
        return [int(row) for row in group]
    ordered = group[np.argsort(np.nan_to_num(reward[group], nan=-math.inf), kind="stable")]
    half = GROUP_SIZE // 2
    return sorted(int(row) for row in (*ordered[:half], *ordered[-half:]))


def sample(step: int, kind: str, row: Mapping[str, Any], tokens: Mapping[str, Any] | None) -> dict[str, Any]:
    """Convert a row to a line of samples.jsonl, with the names of `SampleRecord`."""
    parts = {name.removeprefix(_PART): _finite(value) for name, value in row.items() if name.startswith(_PART)}
    others = {n: v for n, v in row.items() if n not in _OWN | _HIDDEN and not n.startswith(_PART) and v is not None}
    note = row.get("reward_note")
    if note is not None:  # (reward, message, metrics) of a reward that explains itself, such as a judge
        others["reward_note"] = [note[0], note[1], note[2]]
    scored = row.get("reward_status", 0) == 0
    line = {
        "step": step,
        "kind": kind,
        "prompt": _clip(str(row.get("prompt", ""))),
        "completion": _clip(str(row["completion"])),
        "reward": _finite(row["reward"]) if scored else None,
        "parts": parts,
        "columns": {name: _clip(value) if isinstance(value, str) else value for name, value in others.items()},
    }
    line |= {name: row[name] for name in ("prompt_id", "sample_id", "finish_reason") if name in row}
    return line | ({"tokens": tokens} if tokens else {})


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _clip(text: str) -> str:
    return text if len(text) <= MOST_TEXT else f"{text[: MOST_TEXT // 2]} … {text[-MOST_TEXT // 2 :]}"
