"""Kill a run at random moments, resume it each time, and compare it with an uninterrupted run.

    python benchmarks/kills.py [--kills 20] [--signal KILL] [settings of the run]      (about ten minutes)
    python benchmarks/kills.py schedule=async

Prints one line for each kill, and exits with 1 unless all samples, the weights at the end, and all metrics that do not
depend on the machine are equal, bit for bit. A run with schedule=async has no such twin: its prompts must all be
trained on once, in both runs, and no token may be staler than schedule.max_staleness. A checkpoint is written after
every step, so that some kills hit a half-written one.
"""

import argparse
import hashlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

STEPS, PROMPTS, SAMPLES, MAX_STALENESS = 120, 16, 8, 4
RUN = [
    *("preset=quickstart", "runtime=local", "trackers=jsonl", "schedule=pipelined", "placement=split", "run.name=r"),
    *(f"trainer.steps={STEPS}", f"trainer.prompts_per_step={PROMPTS}", f"sampling.samples_per_prompt={SAMPLES}"),
    *(f"trainer.log_samples={PROMPTS * SAMPLES}", "eval.every_steps=7", "checkpoint.every_steps=1"),
]
MACHINE = ("time", "perf/", "time_s/", "controller/", "schedule/engine_idle", "schedule/scored_ahead")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--signal", choices=["KILL", "TERM"], default="KILL")
    parser.add_argument("--seed", type=int, default=0)
    options, more = parser.parse_known_args()
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="rlcore-kills-") as directory:
        whole, cut = Path(directory, "whole"), Path(directory, "cut")
        assert start(whole, more).wait() == 0, "the uninterrupted run failed"
        for number in range(options.kills):
            step = last_step(cut) + chance.randint(1, 3)
            process = start(cut, more)
            while last_step(cut) < step:
                assert process.poll() is None, f"the run ended with {process.returncode} before step {step}"
                time.sleep(0.01)
            time.sleep(chance.uniform(0.0, 0.5))
            process.send_signal(getattr(signal, f"SIG{options.signal}"))
            code = process.wait()
            half = [path.name for path in (cut / "r" / "checkpoints").glob(".*")]
            print(f"kill {number + 1}: after step {last_step(cut)}, exit code {code}, half-written: {half}", flush=True)
        assert start(cut, more).wait() == 0, "the last part failed"
        wrong = unlike_exactly_once(cut, whole) if "schedule=async" in more else unlike(cut, whole)
    print(f"{options.kills} kills of {STEPS} steps: {', '.join(wrong) if wrong else 'no difference'}")
    return 1 if wrong else 0


def unlike(cut: Path, whole: Path) -> list[str]:
    """Return what differs between two runs that must be equal."""
    found = {"metrics": metrics, "samples": samples, "weights": weights}
    return [f"{name.upper()} DIFFER" for name, read in found.items() if read(cut) != read(whole)]


def unlike_exactly_once(*runs: Path) -> list[str]:
    """Return what is wrong with runs of schedule=async, and print the share of responses longer than the median."""
    wrong = []
    for run in runs:
        counts = Counter(line["sample_id"] for line in samples(run))
        if counts != Counter(range(STEPS * PROMPTS * SAMPLES)):
            wrong.append(f"SAMPLES OF {run.name} ARE NOT TRAINED ON ONCE")
        if max(line.get("schedule/staleness_max", 0) for line in metrics(run)) > MAX_STALENESS:
            wrong.append(f"SAMPLES OF {run.name} ARE TOO OLD")
    lengths = [[len(line["completion"]) for line in samples(run)] for run in runs]
    middle = median(lengths[1])
    shares = [sum(length > middle for length in of_run) / len(of_run) for of_run in lengths]
    print(f"responses longer than {middle:g} characters: {shares[0]:.2%}, uninterrupted {shares[1]:.2%}")
    return wrong


def start(directory: Path, more: list[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "rlcore", "train", *RUN, f"run.directory={directory}", *more]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def last_step(directory: Path) -> int:
    return int([{"step": 0}, *metrics(directory)][-1]["step"])


def metrics(directory: Path) -> list[dict[str, float]]:
    """Return the metrics of complete lines that do not depend on the machine."""
    file = directory / "r" / "metrics.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [{name: value for name, value in json.loads(it).items() if not name.startswith(MACHINE)} for it in lines]


def samples(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "r" / "samples.jsonl").read_text().splitlines()]


def weights(directory: Path) -> str:
    """Return a hash of the weights of the last step."""
    (file,) = directory.glob(f"r/checkpoints/step_{STEPS:06}/actor/model.safetensors")
    return hashlib.sha256(file.read_bytes()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
