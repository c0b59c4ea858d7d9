"""Small runs for tests, based on the quickstart, and their metrics."""

from __future__ import annotations

import json
from pathlib import Path

_DEPENDS_ON_THE_MACHINE = (
    "time",
    "perf/",
    "time_s/",
    "controller/",
    "memory_gb/",
    "schedule/engine_",
    "schedule/scored_ahead",
    "schedule/waited",
)


def small_run(directory: Path, *more: str, steps: int = 4) -> list[str]:
    """Return the settings of a run `r` that takes a second or two in one process; `more` overrides them."""
    base = [
        "preset=quickstart",
        "trainer.prompts_per_step=8",
        "sampling.samples_per_prompt=4",
        "eval.max_prompts=16",
        "runtime=local",
        "trackers=jsonl",
        "plugins.hooks=[]",
        f"trainer.steps={steps}",
        f"run.directory={directory}",
        "run.name=r",
    ]
    return list({item.partition("=")[0]: item for item in (*base, *more)}.values())


def metrics(directory: Path) -> list[dict[str, float]]:
    """Return the lines of metrics.jsonl of that run, without values that depend on time and machine."""
    lines = [json.loads(line) for line in (directory / "r" / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if not name.startswith(_DEPENDS_ON_THE_MACHINE)} for line in lines
    ]
