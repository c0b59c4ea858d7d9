"""Draw who works when with schedule=sync, pipelined and async, from runs with real processes and two pools.

    python benchmarks/schedules_measured.py [STEPS]      (about two minutes; writes docs/schedules_measured.png)

The engine is that of overlap.py, whose responses arrive late, by a lognormal time. Needs rlcore-report, which records
the calls of the learner.
"""

import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl

sys.path.insert(0, str(Path(__file__).parent))
from overlap import SCHEDULES, WARM_UP, LateConfig, LateHF

from rlcore.types import Request, Sample

mpl.use("Agg")
import matplotlib.pyplot as plt

SHOWN_S = 8.0
PICTURE = Path(__file__).parents[1] / "docs" / "schedules_measured.png"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedConfig(LateConfig):
    log: str = ""
    """File with begin and end of each response, in seconds since 1970."""


class LoggedHF(LateHF):
    Config = LoggedConfig

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Sample]:
        begin, config = time.time(), self._config
        assert isinstance(config, LoggedConfig)
        async for sample in super().generate(requests):
            with open(config.log, "a") as file:
                file.write(f"[{begin}, {time.time()}]\n")
            yield sample


def main() -> None:
    from rlcore.cli.train import run as train

    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    with tempfile.TemporaryDirectory(prefix="rlcore-schedules-") as directory:
        for schedule in SCHEDULES:
            own = ["preset=quickstart", "runtime=ray", "placement=split", f"rollout={__file__}:LoggedHF"]
            own += [f"rollout.log={directory}/{schedule}.log", "trackers=jsonl", "plugins.hooks=[report]"]
            own += [f"schedule={schedule}", f"trainer.steps={steps}", "eval.every_steps=0", "eval.max_prompts=8"]
            own += ["checkpoint.every_steps=0", f"run.directory={directory}", f"run.name={schedule}"]
            train([*own, "optimizer.lr=1e-4", "trainer.prompts_per_step=32"], dry_run=False)
        draw(Path(directory))
    print(PICTURE)


def draw(directory: Path) -> None:
    """Draw the responses in flight and the learner's calls, in the seconds after the warm-up of each run."""
    figure, axes = plt.subplots(len(SCHEDULES), figsize=(9, 5), sharex=True, layout="constrained")
    for axis, schedule in zip(axes, SCHEDULES):
        learner = list(calls_of_learner(directory / schedule / "report" / "timeline.jsonl"))
        start = next(begin for step, begin, _ in learner if step > WARM_UP)
        responses = rows(directory / f"{schedule}.log")
        times = [SHOWN_S * i / 400 for i in range(401)]
        in_flight = [sum(begin <= start + at < end for begin, end in responses) for at in times]
        axis.fill_between(times, in_flight, color="tab:blue", alpha=0.4, linewidth=0)
        height = max(in_flight)
        for step, begin, seconds in learner:
            color = "tab:orange" if step % 2 else "tab:red"
            axis.barh(-0.12 * height, seconds, 0.16 * height, begin - start, color=color)
        axis.set_ylabel(schedule)
        axis.set_xlim(0, SHOWN_S)
    axes[0].set_title("blue: responses in flight; orange and red: the learner, step by step", fontsize=10)
    axes[-1].set_xlabel("seconds")
    figure.savefig(PICTURE, dpi=110)


def calls_of_learner(file: Path) -> list[tuple[int, float, float]]:
    """Return step, begin in seconds since 1970, and seconds of each call of the actor."""
    return [
        (line["step"], begin, seconds)
        for line in rows(file)
        for name, pool, _, begin, seconds in line["calls"]
        if pool == "actor" and name.startswith("actor.")
    ]


def rows(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()]


if __name__ == "__main__":
    main()
