"""Kill a pipelined run at random moments, resume it each time, and compare it with an uninterrupted run.

    python benchmarks/kills.py [--kills 20] [--signal KILL] [settings of the run]      (about ten minutes)

Prints one line for each kill, and exits with 1 unless all metrics that do not depend on the machine are equal, bit for
bit. A checkpoint is written after every step, so that some kills hit a half-written one.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEPS = 120
RUN = [
    *("preset=quickstart", "runtime=local", "trackers=jsonl", "schedule=pipelined", "placement=split", "run.name=r"),
    *(f"trainer.steps={STEPS}", "trainer.prompts_per_step=16", "eval.every_steps=7", "checkpoint.every_steps=1"),
]
MACHINE = ("time", "perf/", "time_s/", "controller/", "schedule/engine_idle")


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
        equal = metrics(cut) == metrics(whole)
    print(f"{options.kills} kills of {STEPS} steps: {'all metrics are equal' if equal else 'METRICS DIFFER'}")
    return 0 if equal else 1


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


if __name__ == "__main__":
    sys.exit(main())
