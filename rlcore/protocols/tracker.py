"""`Tracker`: a destination of metrics and samples. `rlcore.trackers.jsonl` is an example.

Trackers run on the controller, once per step, in the order of the setting `trackers`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """Facts about the run. Example: RunInfo(name="quickstart", directory=Path("outputs/q"), total_steps=200)"""

    name: str
    directory: Path
    """Existing directory for the tracker's files."""
    total_steps: int
    shows: Mapping[str, str] = field(default_factory=dict)
    """Metric -> label of the metrics that the algorithm shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRecord:
    """One scored sample, for people to read."""

    step: int
    prompt: str
    completion: str
    reward: float | None
    """None: no reward applied, or it failed."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Score by reward name, before weighting; NaN: no score."""
    prompt_id: int = 0
    sample_id: int = 0
    finish_reason: str = "stop"
    columns: Mapping[str, object] = field(default_factory=dict)
    """Columns of the dataset, such as the answer."""


def sample_table(samples: Sequence[SampleRecord]) -> tuple[list[str], list[list[object]]]:
    """Return samples as a table for trackers: column names and rows; None stands for a missing score."""
    rows: list[dict[str, object]] = []
    for it in samples:
        scores = {f"reward/{name}": score if math.isfinite(score) else None for name, score in it.parts.items()}
        texts = {"prompt": it.prompt, "completion": it.completion, "finish_reason": it.finish_reason}
        rows.append({"step": it.step, "prompt_id": it.prompt_id, **texts, "reward": it.reward, **scores})
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return columns, [[row.get(name) for name in columns] for row in rows]


class Tracker(Protocol):
    """A destination of metrics and samples. A class attribute `Config` (dataclass) holds its settings.

    Optional members: `ShowsPhase` and `ShowsDistributions` of `rlcore.protocols.optional`.
    """

    Config: type

    def __init__(self, config: Any, run: RunInfo) -> None: ...

    def start(self, config: Mapping[str, object], *, resume_step: int | None) -> None:
        """Start the run; `config` maps "section.key" to value. After a resume the next step is resume_step + 1."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step. Step 0 is the evaluation before training; any step may lack a name."""

    def log_samples(self, step: int, samples: Sequence[SampleRecord]) -> None:
        """Record a few samples of one step."""

    def finish(self, summary: Mapping[str, object]) -> None:
        """End the run, whether it succeeded or not. May be called twice."""
