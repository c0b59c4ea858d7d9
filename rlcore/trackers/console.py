"""`console`: one line per step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlcore.protocols.tracker import RunInfo, SampleRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleConfig:
    """Nothing to set."""


class ConsoleTracker:
    """One line per step."""

    Config = ConsoleConfig

    def __init__(self, config: ConsoleConfig, run: RunInfo) -> None:
        self._run = run

    def start(self, config: Mapping[str, object], *, resume_step: int | None) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        m = metrics
        print(
            f"step {step}/{self._run.total_steps} reward {m.get('reward/mean', float('nan')):.3f} eval {m.get('eval/pass_rate', float('nan')):.3f} loss {m.get('actor/loss', float('nan')):.5f} {m.get('perf/step_s', 0):.3f} s  share {m.get('perf/controller_share', 0):.3f} {m.get('perf/tokens_per_second', 0):.0f} tok/s",
            flush=True,
        )

    def log_samples(self, step: int, samples: Sequence[SampleRecord]) -> None: ...

    def finish(self, summary: Mapping[str, object]) -> None:
        print(dict(summary))
