"""Wall time of the schedules with real processes: two pools of one core each, and an engine with long-tailed latency.

    python benchmarks/overlap.py [STEPS]      (about four minutes; the machine must be idle)

The engine is `rollout=hf`, which holds each finished response back for a lognormal time: it stands for responses whose
lengths differ, without taking a core. The samples are those of the quickstart. Prints the median time of a step.
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

from rlcore.rollouts.hf import HFConfig, HFRollout
from rlcore.types import Request, Sample

SCHEDULES = ("sync", "pipelined", "async")
WARM_UP = 5


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


def main() -> None:
    from rlcore.cli.train import run as train

    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="rlcore-overlap-") as directory:
        for schedule in SCHEDULES:
            own = [
                "preset=quickstart",
                "runtime=ray",
                "placement=split",
                f"rollout={__file__}:LateHF",
                "trackers=jsonl",
            ]
            own += [f"schedule={schedule}", f"trainer.steps={steps}", "eval.every_steps=0", "eval.max_prompts=8"]
            own += [
                "checkpoint.every_steps=0",
                f"run.directory={directory}",
                f"run.name={schedule}",
                "optimizer.lr=1e-4",
            ]
            own += ["trainer.prompts_per_step=32", "plugins.hooks=[]"]
            train(own, dry_run=False)
            lines = (Path(directory) / schedule / "metrics.jsonl").read_text().splitlines()
            times = [json.loads(it)["perf/step_s"] for it in lines if "perf/step_s" in it]
            found[schedule] = median(times[WARM_UP:])
    print("| schedule | median step | of sync |\n|---|---|---|")
    for schedule, seconds in found.items():
        print(f"| {schedule} | {seconds:.2f} s | {seconds / found['sync']:.2f} × |")


if __name__ == "__main__":
    main()
