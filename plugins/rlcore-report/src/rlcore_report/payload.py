"""The data of the page: runs as plain JSON values, limited in size."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

from rlcore_report.distributions import distributions
from rlcore_report.findings import findings
from rlcore_report.run import Metrics, RecordedRun
from rlcore_report.table import explanation, in_order
from rlcore_report.timeline import CONTROLLER, calls, lanes, waits

MOST_STEPS = 3_000
"""Maximum number of steps of a run in the page; more would not be visible in a chart."""
MOST_CALLS = 20_000
"""Calls in the page: those of the last steps."""
MOST_TEXT = 20_000
"""Characters of a prompt or response."""


def payload(runs: Sequence[RecordedRun], *, most_sample_bytes: int) -> dict[str, Any]:
    """Return the data of the page; samples take at most `most_sample_bytes` before compression."""
    names = in_order({name for run in runs for name in run.metrics.columns})
    shared = most_sample_bytes // max(1, len(runs))
    made = f"{datetime.now():%Y-%m-%d %H:%M}"
    found = [_run(run, name, shared) for run, name in zip(runs, _unique([run.name for run in runs]))]
    key = hashlib.sha256(json.dumps(found, default=str).encode()).hexdigest()
    return {"made": made, "key": key, "table": {name: _explained(name) for name in names}, "runs": found}


def _run(run: RecordedRun, name: str, most_bytes: int) -> dict[str, Any]:
    metrics, notes = _thinned(run.metrics)
    samples, left_out = _some(run.samples, most_bytes)
    return {
        "name": name,
        "state": run.state,
        "step": run.step,
        "total_steps": run.total_steps,
        "seconds": run.summary.get("seconds"),
        "config": run.config,
        "versions": run.versions,
        "shows": run.shows,
        "findings": [asdict(finding) for finding in findings(run)],
        "notes": [*run.notes, *notes, *left_out],
        "steps": metrics.steps,
        "metrics": {column: [_rounded(it) for it in values] for column, values in metrics.columns.items()},
        "samples": samples,
        "distributions": distributions(run),
        "timeline": _timeline(run.timeline),
    }


def _timeline(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return {kinds, names, hosts, calls: [[step, kind, name, host, lane, begin, seconds], …], waits} of the last steps.

    A call gives its kind, name and host by number, and its beginning in seconds after the first call.
    """
    kept, room = list[Mapping[str, Any]](), MOST_CALLS
    for row in reversed(rows):
        room -= len(row["calls"])
        if room < 0:
            break
        kept.append(row)
    found = calls(kept)
    spent: dict[str, float] = {}
    for call in found:
        spent[call.name] = spent.get(call.name, 0.0) + call.seconds
    listed = {
        "kind": sorted({call.kind for call in found}),
        "name": sorted(spent, key=lambda name: -spent[name]),  # the first ones get colors of their own
        "host": sorted({call.host for call in found}, key=lambda host: (host != CONTROLLER, host)),
    }
    numbers = {key: {value: i for i, value in enumerate(values)} for key, values in listed.items()}
    lines = []
    for call, lane in zip(found, lanes(found)):
        place = (numbers[key][getattr(call, key)] for key in numbers)
        lines.append([call.step, *place, lane, round(call.begin - found[0].begin, 4), call.seconds])
    return {**{f"{key}s": values for key, values in listed.items()}, "calls": lines, "waits": waits(found)}


def _explained(name: str) -> dict[str, Any]:
    row = explanation(name)
    if row is None:
        return {"group": "Other", "meaning": "A metric of a plugin that documents it.", "healthy": "–"}
    return {key: value for key, value in asdict(row).items() if key not in ("name", "advice") and value is not None}


def _unique(names: Sequence[str]) -> list[str]:
    """Add numbers to runs of the same name."""
    return [name if names.count(name) == 1 else f"{name} ({i})" for i, name in enumerate(names, 1)]


def _thinned(metrics: Metrics) -> tuple[Metrics, list[str]]:
    """Keep at most MOST_STEPS steps, among them the last one and those of evaluations."""
    count = len(metrics.steps)
    if count <= MOST_STEPS:
        return metrics, []
    evaluated = metrics.columns.get("eval/pass_rate", ())
    chosen = {i * count // MOST_STEPS for i in range(MOST_STEPS)} | {count - 1}
    chosen |= {i for i, value in enumerate(evaluated) if value is not None}
    rows = sorted(chosen)
    columns = {name: [values[i] for i in rows] for name, values in metrics.columns.items()}
    thinned = Metrics(steps=[metrics.steps[i] for i in rows], times=[metrics.times[i] for i in rows], columns=columns)
    return thinned, [f"the curves show {len(rows):,} of {count:,} steps"]


def _some(samples: Sequence[Mapping[str, Any]], most_bytes: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Keep samples within a limit: the best and the worst of each step first, then others, evenly spread."""
    cut = [_shortened(sample) for sample in samples]
    sizes = [len(json.dumps(sample, default=str)) for sample in cut]
    if sum(sizes) <= most_bytes:
        return cut, []
    kept, room = set[int](), most_bytes
    for i in _by_importance(cut):
        if sizes[i] <= room:
            kept.add(i)
            room -= sizes[i]
    note = f"this page has {len(kept):,} of {len(samples):,} logged samples, among them the best and worst of steps"
    return [cut[i] for i in sorted(kept)], [note]


def _by_importance(samples: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return indices: first the extremes of each step, then the others, each in an evenly spread order."""
    extremes: dict[tuple[int, bool], int] = {}
    for i, sample in enumerate(samples):
        reward = sample.get("reward")
        if reward is None:
            continue
        for best in (True, False):
            before = extremes.setdefault((sample["step"], best), i)
            if (reward > samples[before]["reward"]) == best and reward != samples[before]["reward"]:
                extremes[sample["step"], best] = i
    first = sorted(set(extremes.values()))
    others = [i for i in range(len(samples)) if i not in set(first)]
    return [*_spread(first), *_spread(others)]


def _spread(items: Sequence[int]) -> list[int]:
    """Order items so that every prefix is spread evenly over them: the middle one, then the quarters, and so on."""
    return sorted(items, key=lambda i: int(f"{i + 1:032b}"[::-1], 2))


def _shortened(sample: Mapping[str, Any]) -> dict[str, Any]:
    texts = {name: _clip(str(sample.get(name, ""))) for name in ("prompt", "completion")}
    return {**sample, **texts, "columns": _clipped(sample.get("columns") or {})}


def _clipped(value: Any) -> Any:
    if isinstance(value, str):
        return _clip(value)
    if isinstance(value, Mapping):
        return {name: _clipped(item) for name, item in value.items()}
    return [_clipped(item) for item in value] if isinstance(value, list) else value


def _clip(text: str) -> str:
    if len(text) <= MOST_TEXT:
        return text
    half = MOST_TEXT // 2
    return f"{text[:half]}\n… {len(text) - 2 * half:,} characters left out …\n{text[-half:]}"


def _rounded(value: float | None) -> float | None:
    """Round numbers to five digits, which is more than a chart shows."""
    return None if value is None else float(f"{value:.5g}")
