"""`jsonl`: metrics.jsonl and samples.jsonl in the run's directory, one object per line, written immediately.

run.json has the settings of the run, the times of its start and end, and its summary once it has ended.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from rlcore import __version__
from rlcore.protocols.tracker import RunInfo, SampleRecord

logger = logging.getLogger(__name__)
FORMAT = 1
"""Version of the files, in run.json; a change that old readers would misread increases it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JSONLConfig:
    """No settings."""


class JSONLTracker:
    """Files that stay readable after a crash. Infinity and NaN become null and are listed in `non_finite`."""

    Config = JSONLConfig

    def __init__(self, config: JSONLConfig, run: RunInfo) -> None:
        self.metrics_path = run.directory / "metrics.jsonl"
        self.samples_path = run.directory / "samples.jsonl"
        self.run_path = run.directory / "run.json"
        self._run: dict[str, Any] = {"format": FORMAT, "rlcore": __version__, "name": run.name}
        self._run |= {"total_steps": run.total_steps, "shows": dict(run.shows)}
        self._files: dict[Path, TextIO] = {}

    def start(self, config: Mapping[str, object], *, resume_step: int | None) -> None:
        """Open the files; a resume first removes the lines written after its checkpoint."""
        self._describe(started=round(time.time(), 3), resumed_from=resume_step, config=dict(config))
        for path in (self.metrics_path, self.samples_path):
            if resume_step is None:
                _move_aside(path)
            else:
                _cut_after(path, resume_step)
            self._files[path] = path.open("a", encoding="utf-8", errors="backslashreplace")  # also for names of metrics

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        bad = sorted(name for name, value in metrics.items() if not math.isfinite(value))
        line: dict[str, Any] = {"step": step, "time": round(time.time(), 3)}
        line |= {name: None if name in bad else value for name, value in metrics.items()}
        self._write(self.metrics_path, line | ({"non_finite": bad} if bad else {}))

    def log_samples(self, step: int, samples: Sequence[SampleRecord]) -> None:
        for sample in samples:
            self._write(self.samples_path, _finite(asdict(sample)))

    def finish(self, summary: Mapping[str, object]) -> None:
        for file in self._files.values():
            file.close()
        if self._files:
            self._describe(ended=round(time.time(), 3), summary=dict(summary))
        self._files.clear()

    def _describe(self, **facts: Any) -> None:
        """Add facts to run.json, which is replaced atomically."""
        self._run |= facts
        beside = self.run_path.with_suffix(".new")
        text = json.dumps(_finite(self._run), ensure_ascii=False, default=str, indent=1)
        beside.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
        beside.replace(self.run_path)

    def _write(self, path: Path, record: Mapping[str, Any]) -> None:
        file = self._files[path]
        file.write(json.dumps(record, ensure_ascii=False, default=str) + "\n")
        file.flush()


def _finite(value: Any) -> Any:
    """Replace numbers that JSON cannot represent with None; empty cells of datasets are often NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _move_aside(path: Path) -> None:
    """Rename the file of an earlier run with this name."""
    if path.exists():
        number = 1
        while (old := path.with_suffix(f".{number}.jsonl")).exists():
            number += 1
        path.rename(old)


def _cut_after(path: Path, step: int) -> None:
    """Keep the lines up to a step; drop lines that a crash or a full disk left incomplete."""
    if not path.exists():
        return
    beside = path.with_suffix(".cut")
    with path.open("rb") as old, beside.open("wb") as new:  # bytes: a line may end in the middle of a character
        for line in old:
            written = _step_of(line)
            if written is None:
                logger.warning("%s: dropped an incomplete line of %d bytes", path, len(line))
            elif written <= step:
                new.write(line)
    beside.replace(path)


def _step_of(line: bytes) -> int | None:
    try:
        return int(json.loads(line)["step"]) if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError):
        return None
