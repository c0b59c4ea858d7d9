"""Score a file of completions sample by sample, like a run: in a separate process with a timeout."""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlcore.errors import ConfigError
from rlcore.protocols.reward import RewardSpec
from rlcore.registry import resolve
from rlcore.rewards.executor import RewardExecutor
from rlcore.rewards.pipeline import Outcome
from rlcore.rewards.runner import build_reward
from rlcore.rewards.signature import check_columns, read_signature
from rlcore_workbench.options import flat_sample, read_rows

_WIDTH = 40
"""Number of characters of a completion to show."""
_STAND_INS = {
    "finish_reason": "every completion counts as finished ('stop')",
    "num_tokens": "words are counted instead of tokens",
    "prompt": "the prompt is empty",
}
"""Columns that a run provides, and what replaces them here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Sample with the outcome of its reward."""

    completion: str
    outcome: Outcome
    seconds: float
    """Wall time of all rewards together, in seconds."""


def try_rewards(
    names: Sequence[str],
    file: Path,
    options: Mapping[str, Any],
    *,
    timeout_s: float,
    max_rows: int,
    as_json: bool,
) -> int:
    """Score and print the samples; return 0 if every sample has a score or is skipped, else 1."""
    specs = reward_specs(names, options)
    given = [flat_sample(row) for row in read_rows(file, "completions")]
    columns = set.intersection(*(set(row) for row in given))
    rows = [_sample(i, row, file) for i, row in enumerate(given)]
    for spec in specs:
        check_columns(spec.name, build_reward(spec), columns, str(file))
    scored = score(specs, rows, timeout_s)
    if as_json:
        print(json.dumps([{**asdict(one.outcome), "seconds": one.seconds} for one in scored], ensure_ascii=False))
    else:
        print(table([spec.name for spec in specs], scored[:max_rows]))
        print(summary(scored, max_rows))
        for line in remarks(specs, columns):
            print(line)
    return 0 if all(one.outcome.status in ("score", "skip") for one in scored) else 1


def reward_specs(names: Sequence[str], options: Mapping[str, Any]) -> list[RewardSpec]:
    """Resolve the rewards; with several, options are named NAME.OPTION."""
    resolved = [resolve("reward", name) for name in names]
    own = [one.name for one in resolved]
    if len(own) == 1 and not isinstance(options.get(own[0]), Mapping):
        return [RewardSpec(own[0], resolved[0].target, options)]
    for name, value in options.items():
        if name not in own or not isinstance(value, Mapping):
            raise ConfigError(
                f"--option {name}: does not name one of the rewards\nType  --option {own[0]}.{name}=VALUE"
            )
    return [RewardSpec(one.name, one.target, options.get(one.name, {})) for one in resolved]


def score(specs: Sequence[RewardSpec], rows: Sequence[Mapping[str, Any]], timeout_s: float) -> list[Scored]:
    """Score one sample at a time, so that each can be timed."""
    scored = []
    with RewardExecutor(specs, timeout_s=timeout_s) as executor:
        for row in rows:
            start = time.perf_counter()
            (outcome,) = executor.score([row])
            seconds = time.perf_counter() - start
            scored.append(Scored(completion=str(row["completion"]), outcome=outcome, seconds=seconds))
    return scored


def table(names: Sequence[str], scored: Sequence[Scored]) -> str:
    """Return a line per sample: completion, score, parts of several rewards, metrics of the rewards, time."""
    parts = list(names) if len(names) > 1 else []
    measured = sorted({name for one in scored for name in one.outcome.metrics})
    cells = [["#", "COMPLETION", "OUTCOME", "SCORE", *(name.upper() for name in (*parts, *measured)), "MS", ""]]
    for i, one in enumerate(scored):
        outcome = one.outcome
        numbers = [outcome.value, *(outcome.parts.get(name) for name in parts)]
        numbers += [outcome.metrics.get(name) for name in measured]
        shown = [f"{number:.4g}" if number is not None else "-" for number in numbers]
        text = " ".join(one.completion.split())
        text = text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"
        cells.append([str(i), text, outcome.status, *shown, f"{1000 * one.seconds:.2f}", outcome.message or ""])
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    lines = ["  ".join(f"{text:<{width}}" for text, width in zip(line, widths)).rstrip() for line in cells]
    return "\n".join(lines)


def summary(scored: Sequence[Scored], max_rows: int) -> str:
    """Return counts of outcomes, statistics of the scores, and times per sample."""
    values = [one.outcome.value for one in scored if one.outcome.value is not None]
    counts = Counter(one.outcome.status for one in scored)
    times = sorted(one.seconds for one in scored)
    lines = (
        [f"… {len(scored) - max_rows} more samples, scored but not shown; --rows N"] if len(scored) > max_rows else []
    )
    lines.append(f"{len(scored)} samples: {', '.join(f'{count} {status}' for status, count in counts.items())}")
    if values:
        spread = f"mean {statistics.fmean(values):.4g}, standard deviation {statistics.pstdev(values):.4g}"
        lines.append(f"score: {spread}, from {min(values):.4g} to {max(values):.4g}")
        if len(values) > 1 and max(values) == min(values):
            lines.append("all scores are equal: a group of such samples has no gradient")
    slowest = times[-1]
    lines.append(f"time: median {1000 * statistics.median(times):.2f} ms per sample, slowest {1000 * slowest:.2f} ms")
    return "\n".join(lines)


def remarks(specs: Sequence[RewardSpec], columns: Collection[str]) -> list[str]:
    """Return a line for each column that a reward reads and the file lacks."""
    lines = []
    for spec in specs:
        signature = read_signature(build_reward(spec))
        asked = (signature.required | signature.optional) & _STAND_INS.keys() - set(columns)
        lines += [f"{spec.name} reads {name}, which the file lacks: {_STAND_INS[name]}" for name in sorted(asked)]
    return lines


def _sample(number: int, row: dict[str, Any], file: Path) -> dict[str, Any]:
    """Return the row with the columns that a run would add."""
    if not isinstance(row.get("completion"), str):
        raise ConfigError(
            f'{file}, sample {number}: no text under `completion`\nWrite  {{"completion": "…", and the columns of the data}}'
        )
    given = {"prompt": "", "num_tokens": len(row["completion"].split()), "finish_reason": "stop"}
    return {**given, "prompt_id": number, "sample_id": number, **row}
