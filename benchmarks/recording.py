"""Measure the cost of recording a run with rlcore-report, as a share of the step.

    python benchmarks/recording.py             (about two minutes; needs rlcore-report)

The time in the hooks `report` is compared with the step that contains it, so the machine's load cancels out. Two sizes,
as in step.py: the quickstart, and 30 M parameters with responses of 512 tokens.
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from step import LARGE, _large_model

from rlcore.cli.train import plan_run
from rlcore.trainer.launch import launch
from rlcore.trainer.loop import step


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="rlcore-bench-") as directory:
        model = _large_model(Path(directory) / "model")
        _measure("quickstart", [f"run.directory={directory}"], steps=40)
        _measure("30 M parameters", [f"model.path={model}", *LARGE, f"run.directory={directory}"], steps=3)


def _measure(name: str, overrides: list[str], steps: int) -> None:
    fixed = ["preset=quickstart", "runtime=local", "trackers=[report]", "plugins.hooks=[report]", "data.eval="]
    run = launch(*plan_run([*fixed, "trainer.steps=1000", f"run.name=b{time.time_ns()}", *overrides]))
    spent: list[float] = []
    record = run.hooks.samples_scored

    def timed(**arguments: Any) -> None:
        start = time.perf_counter()
        record(**arguments)
        spent.append(time.perf_counter() - start)

    run.hooks.samples_scored = timed  # type: ignore[method-assign]
    try:
        run.hooks.run_start(run=run)
        seconds = [step(run, run.next_step())["perf/step_s"] for _ in range(steps)]
        size = sum(file.stat().st_size for file in (run.directory / "report").iterdir())
    finally:
        run.runtime.shutdown()
    share = statistics.median(one / whole for one, whole in zip(spent[1:], seconds[1:]))
    print(f"{name}: step {statistics.median(seconds[1:]):.3f} s, recording {share:.2%}   budget <= 1 %")
    print(f"  {size / steps / 1000:.0f} kB per step", flush=True)


if __name__ == "__main__":
    main()
