"""The tracker `report`: the phases of every step, and their export as a trace for Perfetto.

The controller reports a call when it begins to wait for it, and the call is shown until the next report. So calls that
overlap are shown one after the other; `time_s/…` has the seconds that workers were busy. With `runtime=local`, a call is
already done when the controller would wait for it, so it is shown from the previous report.
"""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcore.protocols.tracker import RunInfo, SampleRecord
from rlcore_report.bounded import BoundedFile


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineConfig:
    """Size of the recording."""

    most_mb: float = 20.0
    """Maximum size of report/timeline.jsonl, in MB."""


class TimelineTracker:
    """Tracker that writes one line per step: {step, calls: [[name, begin in seconds since 1970, seconds], …]}."""

    Config = TimelineConfig

    def __init__(self, config: TimelineConfig, run: RunInfo) -> None:
        self._config, self._run = config, run
        self._calls: list[tuple[str, float, float]] = []
        self._current: tuple[str, float] | None = None
        self._mark = time.time()
        self._done_when_reported = False
        self._file: BoundedFile | None = None

    def start(self, config: Mapping[str, object], *, resume_step: int | None) -> None:
        self._done_when_reported = config.get("runtime.name") == "local"
        path, most = self._run.directory / "report" / "timeline.jsonl", int(self._config.most_mb * 1e6)
        self._file = BoundedFile(path, most, self._run.total_steps, append=resume_step is not None)

    def phase(self, name: str) -> None:
        """Begin a phase, which ends the previous one."""
        now = time.time()
        if self._done_when_reported and "." in name:
            self._calls.append((name, self._mark, now - self._mark))
            self._current = None
        else:
            self._end(now)
            self._current = name, now
        self._mark = now

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = self._mark = time.time()
        self._end(now)
        calls = [[name, round(begin, 4), round(seconds, 4)] for name, begin, seconds in self._calls]
        self._calls.clear()
        if self._file is not None:
            self._file.write(step, [{"step": step, "calls": calls}])

    def log_samples(self, step: int, samples: Sequence[SampleRecord]) -> None:
        """Do nothing: the hooks `report` record samples."""

    def finish(self, summary: Mapping[str, object]) -> None:
        if self._file is not None:
            self._file.close()

    def _end(self, now: float) -> None:
        if self._current is not None:
            name, begin = self._current
            self._calls.append((name, begin, now - begin))
        self._current = None


def calls(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return {step, name, begin, seconds} of every recorded call."""
    return [
        {"step": row["step"], "name": name, "begin": begin, "seconds": seconds}
        for row in rows
        for name, begin, seconds in row.get("calls", ())
    ]


def write_trace(rows: Sequence[Mapping[str, Any]], path: Path) -> int:
    """Write a gzipped Chrome trace, which ui.perfetto.dev opens, with one track per role; return the number of calls."""
    found = calls(rows)
    tracks = {name: i for i, name in enumerate(dict.fromkeys(_track(call["name"]) for call in found), 1)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": name}} for name, tid in tracks.items()
    ]
    for call in found:
        times = {"ts": round(call["begin"] * 1e6), "dur": round(call["seconds"] * 1e6)}
        place = {"ph": "X", "pid": 1, "tid": tracks[_track(call["name"])], "name": call["name"]}
        events.append({**place, **times, "args": {"step": call["step"]}})
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode(), mtime=0))
    return len(found)


def _track(name: str) -> str:
    """Return the role of a call: "rollout.generate" -> "rollout"; other phases are the controller's."""
    role, dot, _ = name.partition(".")
    return role if dot else "controller"
