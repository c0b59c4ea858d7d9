"""Plot the reward per step of the quickstart for seeds 0 to 4.

    python benchmarks/learning_curves.py       (about six minutes; writes docs/quickstart_seeds.png)

Arguments of the command are added to the settings of each run: runtime=local, trainer.steps=100, …
"""

import json
import sys
import tempfile
from pathlib import Path

import matplotlib as mpl

from rlcore.cli.train import run as train

mpl.use("Agg")
import matplotlib.pyplot as plt

SEEDS = range(5)
PICTURE = Path(__file__).parents[1] / "docs" / "quickstart_seeds.png"


def main() -> None:
    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    with tempfile.TemporaryDirectory(prefix="rlcore-seeds-") as directory:
        for seed in SEEDS:
            lines = _run(Path(directory), seed)
            rewards = [(line["step"], line["reward/mean"]) for line in lines if "reward/mean" in line]
            (curve,) = axes.plot(*zip(*rewards), linewidth=1, label=f"seed {seed}")
            held_out = [(line["step"], line["eval/pass_rate"]) for line in lines if "eval/pass_rate" in line]
            axes.plot(*zip(*held_out), "o", markersize=4, color=curve.get_color())
            print(f"seed {seed}: reward {rewards[0][1]:.3f} → {rewards[-1][1]:.3f}, held-out pass rate", end=" ")
            print(f"{held_out[0][1]:.3f} → {held_out[-1][1]:.3f}, {sum(_seconds(lines)):.0f} s", flush=True)
    axes.set(xlabel="step (64 prompts × 8 samples)", ylabel="mean reward; dots: held-out pass rate", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize="small")
    figure.savefig(PICTURE, dpi=110)
    print(PICTURE)


def _run(directory: Path, seed: int) -> list[dict[str, float]]:
    own = [f"run.directory={directory}", f"run.name=seed{seed}", f"run.seed={seed}", "trackers=jsonl"]
    train(["preset=quickstart", *own, *sys.argv[1:]], dry_run=False)
    return [json.loads(line) for line in (directory / f"seed{seed}" / "metrics.jsonl").read_text().splitlines()]


def _seconds(lines: list[dict[str, float]]) -> list[float]:
    return [line.get("perf/step_s", 0.0) for line in lines]


if __name__ == "__main__":
    main()
