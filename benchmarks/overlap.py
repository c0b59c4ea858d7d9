"""Wall time of the schedules with real processes: two pools of one core each, and an engine with long-tailed latency.

    python benchmarks/overlap.py schedules [STEPS]      (about four minutes; the machine must be idle)
    python benchmarks/overlap.py rewards [STEPS]        rewards that wait, in their step or ahead of it

In the first, the engine is `rollout=hf`, which holds each finished response back for a lognormal time: it stands for
responses whose lengths differ, without taking a core. In the second, the trainer and the rewards wait. The samples are
those of the quickstart. Prints the median time of a step.
"""

import asyncio
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from unittest.mock import patch

from rlcore.backends.local import LocalBackend
from rlcore.rollouts.hf import HFConfig, HFRollout
from rlcore.trainer.rewards_ahead import RewardsAhead
from rlcore.types import Metrics, Request, Sample

SCHEDULES = ("sync", "pipelined", "async")
WARM_UP = 5
LEARNER_S = 0.75
"""Seconds that each of the four optimizer steps takes longer."""
REWARD_S = 0.2 / 8
"""Seconds of the reward of a sample: 0.2 for a group, 1.6 for a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LateConfig(HFConfig):
    """Latency of a response, added to its own time."""

    median_s: float = 0.25
    sigma: float = 1.0
    longest_s: float = 4.0


class LateHF(HFRollout):
    """`hf`, whose responses arrive late."""

    Config = LateConfig

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Sample]:
        config, since = self._config, time.monotonic()
        assert isinstance(config, LateConfig)
        latency = {}
        for it in requests:
            drawn = random.Random(it.seed).lognormvariate(math.log(config.median_s), config.sigma)
            latency[it.request_id] = min(config.longest_s, drawn)
        samples = [it async for it in super().generate(requests)]
        for sample in sorted(samples, key=lambda it: latency[it.request_id]):
            await asyncio.sleep(max(0.0, since + latency[sample.request_id] - time.monotonic()))
            yield sample


class LateBackend(LocalBackend):
    """`local`, whose optimizer steps take LEARNER_S longer: it stands for a larger model."""

    def step(self) -> Metrics:
        time.sleep(LEARNER_S)
        return super().step()


def late(completion: str) -> float:
    """Wait for REWARD_S, as a judge would, without taking a core."""
    time.sleep(REWARD_S)
    return float(len(completion))


def step_s(directory: str, name: str, steps: int, *settings: str) -> float:
    """Return the median time of a step of a run with these settings."""
    from rlcore.cli.train import run as train

    own = ["preset=quickstart", "runtime=ray", "placement=split", "trackers=jsonl", "plugins.hooks=[]"]
    own += [f"trainer.steps={steps}", "eval.every_steps=0", "eval.max_prompts=8", "checkpoint.every_steps=0"]
    train([*own, f"run.directory={directory}", f"run.name={name}", *settings], dry_run=False)
    lines = (Path(directory) / name / "metrics.jsonl").read_text().splitlines()
    return median([json.loads(it)["perf/step_s"] for it in lines if "perf/step_s" in it][WARM_UP:])


def schedules(directory: str, steps: int) -> dict[str, float]:
    """Return schedule -> median step with an engine whose latency has a long tail."""
    more = (f"rollout={__file__}:LateHF", "optimizer.lr=1e-4", "trainer.prompts_per_step=32")
    return {it: step_s(directory, it, steps, f"schedule={it}", *more) for it in SCHEDULES}


def rewards(directory: str, steps: int) -> dict[str, float]:
    """Return schedule and place of slow rewards -> median step; the trainer is slow as well."""
    more = ("trainer.prompts_per_step=8", f"backend={__file__}:LateBackend", f"reward={__file__}:late")
    found = {}
    for schedule in SCHEDULES:
        settings = (f"schedule={schedule}", *more, "reward.num_processes=1")
        with patch.object(RewardsAhead, "of", lambda groups: None):
            found[f"{schedule}, in the step"] = step_s(directory, f"{schedule}_in_step", steps, *settings)
        if schedule != "sync":
            found[f"{schedule}, ahead"] = step_s(directory, f"{schedule}_ahead", steps, *settings)
    return found


def main() -> None:
    what = sys.argv[1] if len(sys.argv) > 1 else "schedules"
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 30
    with tempfile.TemporaryDirectory(prefix="rlcore-overlap-") as directory:
        found = {"schedules": schedules, "rewards": rewards}[what](directory, steps)
    first = next(iter(found.values()))
    print(f"| {what} | median step | of sync |\n|---|---|---|")
    for name, seconds in found.items():
        print(f"| {name} | {seconds:.2f} s | {seconds / first:.2f} × |")


if __name__ == "__main__":
    main()
