"""`Tracker`: where metrics and samples go. `rlcore.trackers.jsonl` is the first example.

Lives on the controller; called once per step, in the order of the config's list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What a tracker knows of its run. Example: RunInfo(name="quickstart", directory=Path("outputs/q"), total_steps=200)"""

    name: str
    directory: Path
    """Exists; files of the tracker go here."""
    total_steps: int
    shows: Mapping[str, str] = field(default_factory=dict)
    """Metric -> label of those that the algorithm wants shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRecord:
    """One scored sample, for people to read."""

    step: int
    prompt: str
    completion: str
    reward: float | None
    """None: no reward applied, or it failed."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Score by reward name, before weighting; NaN where it has none."""
    prompt_id: int = 0
    sample_id: int = 0
    finish_reason: str = "stop"
    columns: Mapping[str, object] = field(default_factory=dict)
    """Columns of the data set, such as the answer."""


class Tracker(Protocol):
    """A sink. A class attribute `Config` (dataclass) holds its settings.

    Optional member: `ShowsPhase` of `rlcore.protocols.optional`.
    """

    Config: type

    def __init__(self, config: Any, run: RunInfo) -> None: ...

    def start(self, config: Mapping[str, object], *, resume_step: int | None) -> None:
        """The run begins; `config` is flat, "section.key" to value. After a resume the next step is resume_step + 1."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of one step. Step 0 is the evaluation before training; a name may be missing in any step."""

    def log_samples(self, step: int, samples: Sequence[SampleRecord]) -> None:
        """A few samples of one step."""

    def finish(self, summary: Mapping[str, object]) -> None:
        """The run ends, well or not. May be called twice."""
