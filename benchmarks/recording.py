"""Measure the cost of recording a run with rlcore-report, as a share of the step.

    python benchmarks/recording.py             (about two minutes; needs rlcore-report)

The processor time in the hooks `report` and in noting the times of calls is compared with the step that contains it, so the
machine's load cancels out. Steps with and without recording alternate in one run, and the ratio of their medians is
printed, too. Two sizes, as in step.py: the quickstart, and 30 M parameters with responses of 512 tokens.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from step import LARGE, _large_model

from rlcore.cli.train import plan_run
from rlcore.controller.record import Record
from rlcore.trainer.launch import launch
from rlcore.trainer.loop import step


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="rlcore-bench-") as directory:
        model = _large_model(Path(directory) / "model")
        _measure("quickstart", [f"run.directory={directory}"], steps=40)
        _measure("30 M parameters", [f"model.path={model}", *LARGE, f"run.directory={directory}"], steps=3)


def _measure(name: str, overrides: list[str], steps: int) -> None:
    fixed = ["preset=quickstart", "runtime=local", "trackers=[]", "plugins.hooks=[report]", "data.eval="]
    run = launch(*plan_run([*fixed, "trainer.steps=1000", f"run.name=b{time.time_ns()}", *overrides]))
    spent = 0.0
    recording = True

    def timed(function: Callable[..., Any], *, is_hook: bool) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> None:
            nonlocal spent
            start = time.process_time()
            if recording or not is_hook:
                function(*args, **kwargs)
            spent += time.process_time() - start

        return wrapper

    ran = Record.ran
    run.hooks.samples_scored = timed(run.hooks.samples_scored, is_hook=True)  # type: ignore[method-assign]
    run.hooks.step_end = timed(run.hooks.step_end, is_hook=True)  # type: ignore[method-assign]
    Record.ran = timed(ran, is_hook=False)  # type: ignore[method-assign]
    shares, seconds = list[float](), dict[bool, list[float]]({True: [], False: []})
    try:
        run.hooks.run_start(run=run)
        for number in range(-2, 2 * steps):  # the first two warm up
            spent, recording, start = 0.0, number % 2 == 0, time.process_time()
            step(run, run.next_step())
            whole = time.process_time() - start
            if number >= 0:
                seconds[recording].append(whole)
                shares += [spent / whole] if recording else []
        run.hooks.run_end(run=run, error=None)
        size = sum(file.stat().st_size for file in (run.directory / "report").iterdir())
    finally:
        Record.ran = ran  # type: ignore[method-assign]
        run.runtime.shutdown()
    with_it, without = (statistics.median(seconds[recorded]) for recorded in (True, False))
    print(f"{name}: step {with_it:.3f} s, recording {statistics.median(shares):.2%}   budget <= 1 %")
    print(
        f"  {with_it / without:.3f} x of a step without recording; {size / (steps + 1) / 1000:.0f} kB per step",
        flush=True,
    )


if __name__ == "__main__":
    main()
