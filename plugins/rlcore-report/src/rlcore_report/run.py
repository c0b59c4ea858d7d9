"""`read_run`: the files of a run's directory as one value.

RUN/run.json             settings, start, end and summary
RUN/metrics.jsonl        one line per step
RUN/samples.jsonl        one line per logged sample
RUN/report/*.jsonl       samples, distributions and timeline of the hooks `report`, if used
RUN/.lock                locked while a process trains there
RUN/checkpoints/*/trainer.json   settings and versions of plugins; read where run.json is missing
"""

from __future__ import annotations

import fcntl
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlcore.config.build import flatten
from rlcore.errors import ConfigError, did_you_mean
from rlcore_report.lines import read_lines

State = Literal["running", "finished", "stopped", "crashed", "killed", "unknown"]
FORMAT = 1
"""Newest format of run.json that this version reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Metrics of a run, as columns."""

    steps: Sequence[int]
    """[N] increasing."""
    times: Sequence[float | None]
    """[N] seconds since 1970, when the step was logged."""
    columns: Mapping[str, Sequence[float | None]]
    """Name -> [N] values; None: not measured at this step, or not finite."""

    def known(self, name: str) -> list[tuple[int, float]]:
        """Return (step, value) where a metric has a value."""
        values = self.columns.get(name, ())
        return [(step, value) for step, value in zip(self.steps, values) if value is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """A run as its directory describes it."""

    directory: Path
    name: str
    state: State
    total_steps: int | None
    config: Mapping[str, Any]
    """Setting -> value, such as "trainer.steps"."""
    versions: Mapping[str, str]
    """Package -> version."""
    summary: Mapping[str, Any]
    """Facts that the run wrote at its end; may be empty."""
    shows: Mapping[str, str]
    """Metric -> label of the metrics that the algorithm shows."""
    metrics: Metrics
    samples: Sequence[Mapping[str, Any]]
    """Logged and recorded samples; of two records of one sample, the one with more."""
    distributions: Sequence[Mapping[str, Any]]
    """Recorded histograms, one mapping per step; may be empty."""
    timeline: Sequence[Mapping[str, Any]]
    """Recorded calls, one mapping per step, evaluation and checkpoint; may be empty."""
    notes: Sequence[str] = field(default_factory=list)
    """Notes about missing data and the reasons, as sentences."""

    @property
    def step(self) -> int:
        """The last step with metrics."""
        return self.metrics.steps[-1] if self.metrics.steps else 0


def read_run(directory: Path) -> RecordedRun:
    """Read a run that is in progress, finished, crashed or killed.

    Raises:
        ConfigError: the directory is missing, is not a run, or was written in a newer format.
    """
    _check(directory)
    notes: list[str] = []
    about = _read_json(directory / "run.json", notes)
    _check_format(directory, about)
    checkpoint = _newest_checkpoint(directory, notes)
    if not about:
        notes.append("run.json is missing, so settings are those of the last checkpoint, if there is one")
    config = about.get("config") or flatten(checkpoint.get("config", {}))
    lines = read_lines(directory / "metrics.jsonl")
    samples = read_lines(directory / "samples.jsonl")
    recorded, distributions, timeline = (
        read_lines(directory / "report" / f"{name}.jsonl") for name in ("samples", "distributions", "timeline")
    )
    if not lines.rows and not (directory / "metrics.jsonl").exists():
        notes.append("there is no metrics.jsonl: the setting trackers does not have jsonl")
    metrics = _columns(lines.rows)
    total = about.get("total_steps", config.get("trainer.steps"))
    return RecordedRun(
        directory=directory,
        name=str(about.get("name", directory.absolute().name)),
        state=_state(directory, about, metrics, total),
        total_steps=total if isinstance(total, int) else None,
        config=config,
        versions={**({"rlcore": str(about["rlcore"])} if "rlcore" in about else {}), **checkpoint.get("versions", {})},
        summary=about.get("summary", {}),
        shows=about.get("shows", {}),
        metrics=metrics,
        samples=_merged(samples.rows, _valid(recorded.rows)),
        distributions=_valid(distributions.rows),
        timeline=_valid(_with_calls(timeline.rows, notes)),
        notes=[*notes, *lines.notes, *samples.notes, *recorded.notes, *distributions.notes, *timeline.notes],
    )


def _check(directory: Path) -> None:
    """Refuse a path that is not the directory of a run."""
    if not directory.exists():
        beside = [it.name for it in directory.parent.glob("*") if it.is_dir()] if directory.parent.is_dir() else []
        hint = did_you_mean(directory.name, beside)
        raise ConfigError(f"no such run: '{directory}'.{hint}\nType the directory of a run, such as  outputs/NAME")
    if not directory.is_dir():
        raise ConfigError(f"'{directory}' is a file, not the directory of a run\nType  {directory.parent}")
    if _is_run(directory):
        return
    runs = sorted((it for it in directory.glob("*") if _is_run(it)), key=lambda it: it.stat().st_mtime, reverse=True)
    advice = f"Runs in it: {', '.join(str(it) for it in runs[:5])}" if runs else "Type the directory of a run"
    raise ConfigError(f"'{directory}' is not a run: it has neither run.json nor metrics.jsonl\n{advice}")


def _is_run(directory: Path) -> bool:
    return any((directory / name).is_file() for name in ("run.json", "metrics.jsonl"))


def _check_format(directory: Path, about: Mapping[str, Any]) -> None:
    written = about.get("format", FORMAT)
    if not isinstance(written, int) or written > FORMAT:
        raise ConfigError(
            f"{directory} has format {written} of rlcore {about.get('rlcore', '?')}; this version reads up to {FORMAT}\n"
            "Type  pip install --upgrade rlcore-report"
        )


def _read_json(path: Path, notes: list[str]) -> dict[str, Any]:
    """Read a JSON object; return an empty one if the file is missing or damaged, which is noted."""
    try:
        found = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        notes.append(f"{path.name} is damaged and was ignored: {error}")
        return {}
    return found if isinstance(found, dict) else {}


def _newest_checkpoint(directory: Path, notes: list[str]) -> dict[str, Any]:
    paths = sorted(directory.glob("checkpoints/step_*/trainer.json"))
    return _read_json(paths[-1], notes) if paths else {}


def _columns(rows: Sequence[Mapping[str, Any]]) -> Metrics:
    """Convert lines to columns; of two lines of one step, the later one counts."""
    by_step = {row["step"]: row for row in rows}
    ordered = [by_step[step] for step in sorted(by_step)]
    own = ("step", "time", "non_finite")
    names = dict.fromkeys(name for row in ordered for name in row if name not in own)
    return Metrics(
        steps=sorted(by_step),
        times=[_number(row.get("time")) for row in ordered],
        columns={name: [_number(row.get(name)) for row in ordered] for name in names},
    )


def _valid(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drop rows of steps that were written again after a resume."""
    kept: list[dict[str, Any]] = []
    limit = math.inf
    for row in reversed(rows):
        if row["step"] <= limit:
            kept.append(row)
            limit = row["step"]
        elif row["step"] > kept[-1]["step"]:  # written before a resume that went back to an earlier step
            limit = kept[-1]["step"] - 1
    return kept[::-1]


def _with_calls(rows: Sequence[dict[str, Any]], notes: list[str]) -> list[dict[str, Any]]:
    """Return the lines of timeline.jsonl whose calls can be read; note the number of others."""
    kept = [row for row in rows if all(len(it) == 5 for it in row.get("calls", ["damaged"]))]
    if len(kept) < len(rows):
        notes.append(f"timeline.jsonl: left out {len(rows) - len(kept)} lines without calls of ranks")
    return kept


def _merged(logged: Sequence[dict[str, Any]], recorded: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join logged and recorded samples in the order of steps; a recorded sample replaces its logged line."""
    known = {(row["step"], row.get("sample_id")) for row in recorded if row.get("kind") == "training"}
    others = [row for row in logged if (row["step"], row.get("sample_id")) not in known]
    return sorted([*recorded, *others], key=lambda row: int(row["step"]))


def _number(value: object) -> float | None:
    """Return a finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _state(directory: Path, about: Mapping[str, Any], metrics: Metrics, total: object) -> State:
    """Return the state of a run, from its summary, otherwise its lock, otherwise its last step."""
    summary = about.get("summary")
    if _is_locked(directory / ".lock"):
        return "running"
    if summary is None:
        if about:
            return "killed"  # it started and wrote no summary, and no process holds its lock
        return "finished" if metrics.steps and metrics.steps[-1] == total else "unknown"
    if summary.get("error"):
        return "stopped" if summary["error"] == "interrupted" else "crashed"
    return "finished" if summary.get("steps") == summary.get("total_steps") else "stopped"


def _is_locked(path: Path) -> bool:
    """Return whether a process trains there. The lock is taken for an instant, and shared with other readers."""
    try:
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no lock, or a file system without locks
        return False
    return False
