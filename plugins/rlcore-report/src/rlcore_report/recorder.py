"""The hooks `report`: whole groups with their tokens, evaluation samples, distributions, and the times of calls.

rlcore train … plugins.hooks=[report]

RUN/report/samples.jsonl         a few groups of each step, chosen by reward, and held-out samples
RUN/report/distributions.jsonl   histograms of all samples of each step
RUN/report/timeline.jsonl        when the calls of steps, evaluations and checkpoints ran, on each rank
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

import rlcore
from rlcore.hooks import RunView
from rlcore_report.bounded import BoundedFile
from rlcore_report.histogram import summary_of

logger = logging.getLogger(__name__)

MOST_BYTES = {"samples": 100_000_000, "distributions": 10_000_000, "timeline": 20_000_000}
"""Maximum size of each file."""
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
        self._files: dict[str, BoundedFile] = {}
        self._warned = False
        self._tokenizer: Any = None
        self._texts: dict[int, str] = {}
        self._pending: dict[int, list[dict[str, Any]]] = {}
        """Step -> its samples, which are written at its end together with the columns of the algorithm."""

    @rlcore.hookimpl
    def rlcore_run_start(self, run: RunView) -> None:
        from rlcore.models.load import load_tokenizer

        total, append = run.config.trainer.steps, run.counters.step > 0
        for name, most_bytes in MOST_BYTES.items():
            path = run.directory / "report" / f"{name}.jsonl"
            self._files[name] = BoundedFile(path, most_bytes, total, append=append, warn=self._warn)
        self._tokenizer = load_tokenizer(run.config.model.path)

    @rlcore.hookimpl
    def rlcore_samples_scored(self, run: RunView, step: int, samples: Any) -> None:
        """Record the distributions of a step, and keep some of its groups until its end."""
        reward, group_id, length, version = (
            column.numpy() for column in samples.fetch("reward", "group_id", "num_loss_tokens", "policy_version")
        )
        measured = {"reward": reward, "length": length, "lag": step - 1 - version}
        line = {name: found for name, values in measured.items() if (found := summary_of(values))}
        self._files["distributions"].write(step, [{"step": step, **line}])
        rows = [row for group in chosen_groups(reward, group_id, step) for row in group]
        self._pending.setdefault(step, []).extend(self._lines(step, samples.take(rows), kind="training"))

    @rlcore.hookimpl
    def rlcore_step_end(self, run: RunView, step: int, calls: Sequence[Any], experience: Any) -> None:
        lines = self._pending.pop(step, [])
        add_columns(lines, experience)
        self._files["samples"].write(step, lines)
        self._record_calls(step, "step", calls)

    @rlcore.hookimpl
    def rlcore_evaluated(self, run: RunView, step: int, samples: Any, calls: Sequence[Any]) -> None:
        """Record held-out samples: of the same prompts in every evaluation."""
        self._record_calls(step, "evaluation", calls)
        if {"reward", "completion"} <= set(samples.columns):  # an algorithm's own evaluation may return other rows
            count = min(len(samples), EVAL_PROMPTS)
            chosen = samples.take([i * len(samples) // count for i in range(count)])
            self._files["samples"].write(step, self._lines(step, chosen, kind="evaluation"))

    @rlcore.hookimpl
    def rlcore_checkpoint_saved(self, run: RunView, calls: Sequence[Any]) -> None:
        """Record the calls under the current step, because a checkpoint may be complete one step later."""
        self._record_calls(run.counters.step, "checkpoint", calls)

    @rlcore.hookimpl
    def rlcore_run_end(self, run: RunView, error: BaseException | None) -> None:
        for step, lines in self._pending.items():  # of a step that failed after its samples had rewards
            self._files["samples"].write(step, lines)
        for file in self._files.values():
            file.close()

    def _warn(self, reason: str) -> None:
        if not self._warned:
            logger.warning("%s; the run continues, but its recording is incomplete", reason)
        self._warned = True

    def _record_calls(self, step: int, kind: str, calls: Sequence[Any]) -> None:
        times = [[it.name, it.pool, it.rank, round(it.begin, 4), round(it.seconds, 4)] for it in calls]
        self._files["timeline"].write(step, [{"step": step, "kind": kind, "calls": times}])

    def _lines(self, step: int, samples: Any, *, kind: str) -> list[dict[str, Any]]:
        batch = samples.local()
        levels = {name: batch.level(name) for name in batch.columns}
        columns = {name: batch[name].tolist() for name, level in levels.items() if level != "token"}
        tokens = self._tokens(batch) if kind == "training" else [None] * len(batch)
        rows = ({name: values[i] for name, values in columns.items()} for i in range(len(batch)))
        return [sample(step, kind, row, more) for row, more in zip(rows, tokens)]

    def _tokens(self, batch: Any) -> Iterator[dict[str, Any]]:
        """Yield the tokens of each response, from the first one that is learned from."""
        names = [name for name in ("input_ids", "rollout_log_probs", "loss_mask", "token_version") if name in batch]
        columns = {name: batch[name].tolist() for name in names}  # once, not per row: small tensors are slow
        for part in response_slices(batch):
            tokens = {
                "text": [self._text(token) for token in columns["input_ids"][part]],
                "log_prob": _rounded(columns["rollout_log_probs"][part]),
                "mask": [int(learned) for learned in columns["loss_mask"][part]],
            }
            if "token_version" in columns:
                versions = columns["token_version"][part]
                tokens["version"] = versions if len(set(versions)) > 1 else next(iter(versions), -1)
            yield tokens

    def _text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = self._tokenizer.decode([token])
        return self._texts[token]


def response_slices(batch: Any) -> list[slice]:
    """Return the tokens of each row from the first one that is learned from, at most MOST_TOKENS."""
    slices, mask = [], batch["loss_mask"].tolist()
    for begin, end in pairwise(batch.offsets().tolist()):
        first = mask.index(True, begin, end) if True in mask[begin:end] else end
        slices.append(slice(first, min(end, first + MOST_TOKENS)))
    return slices


def add_columns(lines: Sequence[dict[str, Any]], experience: Any) -> None:
    """Add the algorithm's columns of each token to recorded samples.

    `advantage` is a number if the algorithm has one per sample; `gap` is the log-prob of the trainer minus that of the engine.
    Columns that the algorithm does not have are left out, and samples that it dropped have none.
    """
    names = {"advantages", "advantage", "old_log_probs", "rollout_log_probs", "entropy"} & set(experience.columns)
    if not lines or not {"sample_id", "loss_mask"} <= set(experience.columns):
        return
    row_of = {sample_id: row for row, sample_id in enumerate(experience.fetch("sample_id").tolist())}
    kept = [line for line in lines if line.get("sample_id") in row_of]
    batch = experience.select("loss_mask", *names).take([row_of[line["sample_id"]] for line in kept]).local()
    columns = {name: batch[name].tolist() for name in names}
    if {"old_log_probs", "rollout_log_probs"} <= names:
        columns["gap"] = (batch["old_log_probs"] - batch["rollout_log_probs"]).tolist()
    for row, (line, part) in enumerate(zip(kept, response_slices(batch))):
        tokens = line["tokens"]
        if part.stop - part.start != len(tokens["text"]):  # the algorithm changed the sample
            continue
        if "advantages" in names:
            tokens["advantage"] = _rounded(columns["advantages"][part])
        elif "advantage" in names:
            tokens["advantage"] = round(columns["advantage"][row], 3)
        if "gap" in columns:
            tokens["gap"] = _rounded(columns["gap"][part], 4)
        if "entropy" in names:
            tokens["entropy"] = _rounded(columns["entropy"][part])


def _rounded(values: Sequence[float], digits: int = 3) -> list[float]:
    return [round(value, digits) for value in values]


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
