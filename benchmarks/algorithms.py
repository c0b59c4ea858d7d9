"""Compare all algorithms that need only a reward: reward on the quickstart task after equally many samples.

    pip install -e plugins/rlcore-algorithms
    python benchmarks/algorithms.py            (writes docs/algorithms.png, prints the table of benchmarks/README.md)

Each algorithm runs with three seeds. It uses four mini-batches per step, like the quickstart, and its own defaults. If
those defaults are meant for other tasks, it uses conf/algorithm/quickstart_NAME.yaml of the package instead. Runs that
are already in the directory are not repeated, so that an interrupted measurement can be resumed.

    python benchmarks/algorithms.py --only gspo sapo --seeds 0 --samples 5120 --directory /tmp/try
"""

import argparse
import json
import statistics
from pathlib import Path

import matplotlib as mpl

from rlcore.cli.train import run as train
from rlcore.config.compose import presets
from rlcore.registry import catalog

mpl.use("Agg")
import matplotlib.pyplot as plt

PICTURE = Path(__file__).parents[1] / "docs" / "algorithms.png"
PACKAGE = "rlcore-algorithms"
PER_STEP = 64 * 8
OTHER_DATA = {"sft", "dpo", "reward_model", "distillation"}
"""Algorithms that learn from texts or a teacher, not from the reward of the quickstart."""
SLOWER = ("cispo", "gpg", "kl_cov", "online_dpo", "remax", "sapo")
"""Algorithms with a third of the quickstart's learning rate. The full one is made for clipped steps; with it, their reward
first collapses."""
OTHER_SETTINGS = {
    "remax": ["sampling.samples_per_prompt=1", "trainer.prompts_per_step=512"],
    "dual_clip_ppo": ["critic.optimizer.lr=1e-3"],
}
"""Settings outside the section of the algorithm. ReMax gets its baseline from one additional greedy response per prompt."""


def main() -> None:
    options = _options()
    curves = {
        name: [_curve(options, name, seed) for seed in options.seeds]
        for name in sorted(options.only, key=lambda name: (name != "grpo", name))
    }
    ends = {name: [_end(curve, options.samples) for curve in of_seeds] for name, of_seeds in curves.items()}
    print(f"| algorithm | reward after {options.samples:,} samples | seeds | seconds per run |\n|---|---|---|---|")
    for name in sorted(ends, key=lambda name: -statistics.mean(ends[name])):
        seconds = statistics.mean(sum(point[2] for point in curve) for curve in curves[name])
        values = ", ".join(f"{value:.3f}" for value in ends[name])
        mark = " (lr 3e-4)" if name in SLOWER else ""
        print(f"| {name}{mark} | {statistics.mean(ends[name]):.3f} | {values} | {seconds:.0f} |")
    _draw(curves, options)


def _options() -> argparse.Namespace:
    known = ["grpo", *(e.name for e in catalog().of("algorithm") if e.package == PACKAGE and e.name not in OTHER_DATA)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=known, default=known)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--samples", type=int, default=100 * PER_STEP)
    parser.add_argument("--directory", type=Path, default=Path("outputs/algorithms"))
    parser.add_argument("--picture", type=Path, default=PICTURE)
    return parser.parse_args()


def _curve(options: argparse.Namespace, name: str, seed: int) -> list[tuple[float, float, float]]:
    """Return (samples so far, mean reward, seconds) of every step; train first if there is no such run."""
    directory = options.directory / str(options.samples)
    file = directory / f"{name}-{seed}" / "metrics.jsonl"
    steps = options.samples // PER_STEP
    lines = _lines(file)
    if not lines or lines[-1]["step"] < steps:
        own = [*_settings(name), f"run.seed={seed}", *OTHER_SETTINGS.get(name, [])]
        own += ["optimizer.lr=3e-4"] if name in SLOWER else []
        where = [f"run.directory={directory}", f"run.name={name}-{seed}", f"trainer.steps={steps}"]
        quiet = ["runtime=local", "trackers=jsonl", "eval.every_steps=0", "checkpoint.every_steps=0"]
        train(["preset=quickstart", *own, *where, *quiet, "run.resume=never"], dry_run=False)
        lines = _lines(file)
    return [(line["progress/samples"], line["reward/mean"], line["perf/step_s"]) for line in lines if line["step"]]


def _settings(name: str) -> list[str]:
    if name == "grpo":
        return []
    file = f"quickstart_{name}"
    chosen = file if file in presets("algorithm") else f"{name}@{PACKAGE}"
    return [f"algorithm={chosen}", "algorithm.minibatches=4"]


def _lines(file: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def _end(curve: list[tuple[float, float, float]], samples: int) -> float:
    """Return the mean reward of the last five steps within the budget; refilled groups use it up faster."""
    return statistics.mean([reward for used, reward, _ in curve if used <= samples][-5:])


def _draw(curves: dict[str, list[list[tuple[float, float, float]]]], options: argparse.Namespace) -> None:
    columns = min(5, len(curves))
    rows = -(-len(curves) // columns)
    figure, grid = plt.subplots(
        rows,
        columns,
        figsize=(2.3 * columns, 1.8 * rows),
        sharex=True,
        sharey=True,
        layout="constrained",
        squeeze=False,
    )
    for axes in grid.flat[len(curves) :]:
        axes.set_axis_off()
    for axes, (name, of_seeds) in zip(grid.flat, curves.items()):
        for curve in curves.get("grpo", []):
            axes.plot([used for used, _, _ in curve], [reward for _, reward, _ in curve], color="0.8", linewidth=0.8)
        for curve in of_seeds:
            inside = [(used, reward) for used, reward, _ in curve if used <= options.samples]
            axes.plot(*zip(*inside), linewidth=1.0, color="C0")
        axes.set_title(name, fontsize="small")
        axes.grid(alpha=0.3)
        axes.set_ylim(0, 1.02)
        axes.tick_params(labelsize="x-small")
    figure.supxlabel("samples", fontsize="small")
    figure.supylabel("mean reward; gray: grpo", fontsize="small")
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(options.picture, dpi=110)
    print(options.picture)


if __name__ == "__main__":
    main()
