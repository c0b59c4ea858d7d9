"""Learning from samples of older weights: the quickstart with each schedule, with and without correction, seeds 0 to 4.

    python benchmarks/staleness.py DIR         (about half an hour on an idle core; writes docs/staleness.png)
    python benchmarks/staleness.py DIR sync pipelined/token trainer.steps=100      (some of the runs, other settings)

Prints how many samples each run needs until the held-out pass rate reaches 0.95, measured every five steps. Runs that
are complete in DIR are not repeated.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import matplotlib as mpl

from rlcore.cli.train import run as train

mpl.use("Agg")
import matplotlib.pyplot as plt

SEEDS = range(5)
GOAL = 0.95
PICTURE = Path(__file__).parents[1] / "docs" / "staleness.png"
TOKEN = "algorithm.correction.weight=token"
RUNS: Mapping[str, Sequence[str]] = {
    "sync": ["schedule=sync"],
    "pipelined": ["schedule=pipelined"],
    "pipelined/token": ["schedule=pipelined", TOKEN],
    "async": ["schedule=async"],
    "async/token": ["schedule=async", TOKEN],
}
COLORS = {"sync": "gray", "pipelined": "tab:blue", "async": "tab:red"}
Line = dict[str, float]


def main() -> None:
    directory, *arguments = sys.argv[1:]
    names = [it for it in arguments if it in RUNS] or list(RUNS)
    more = [it for it in arguments if it not in RUNS]
    found: dict[str, list[list[Line]]] = {name: [] for name in names}
    print("| run | samples until 0.95, median (seeds) | of sync | final pass rate | policy gap | effective size |")
    print("|---|---|---|---|---|---|")
    for name, runs in found.items():
        runs += [_run(Path(directory), name, seed, more) for seed in SEEDS]
        print(_row(name, runs, found.get("sync")), flush=True)
    _draw(found)
    print(PICTURE)


def _run(directory: Path, name: str, seed: int, more: Iterable[str]) -> list[Line]:
    run = f"{name.replace('/', '-')}-{seed}"
    own = [f"run.directory={directory}", f"run.name={run}", f"run.seed={seed}", "trackers=jsonl", "eval.every_steps=5"]
    own += ["checkpoint.every_steps=0", "runtime=local", "placement=split", *RUNS[name]]
    train(["preset=quickstart", *own, *more], dry_run=False)
    return [json.loads(line) for line in (directory / run / "metrics.jsonl").read_text().splitlines()]


def _row(name: str, runs: Sequence[Sequence[Line]], sync: Sequence[Sequence[Line]] | None) -> str:
    needed = [_until_goal(lines) for lines in runs]
    relative = median(needed) / median(map(_until_goal, sync)) if sync else float("nan")
    each = " ".join(f"{it:,.0f}" for it in needed)
    last = fmean(lines[-1]["eval/pass_rate"] for lines in runs)
    measured = (_mean(runs, f"actor/{metric}") for metric in ("policy_gap", "correction/effective_size"))
    cells = [name, f"{median(needed):,.0f} ({each})", f"{relative:.2f} ×", f"{last:.3f}", *measured]
    return f"| {' | '.join(cells)} |"


def _until_goal(lines: Iterable[Line]) -> float:
    """Return the samples of a run until its first evaluation that reaches the goal; infinite if none does."""
    reached = (it.get("progress/samples", 0.0) for it in lines if it.get("eval/pass_rate", 0.0) >= GOAL)
    return next(reached, float("inf"))


def _point(line: Line) -> tuple[float, float]:
    return line.get("progress/samples", 0.0), line["eval/pass_rate"]


def _mean(runs: Iterable[Iterable[Line]], name: str) -> str:
    values = [line[name] for lines in runs for line in lines if name in line]
    return f"{fmean(values):.2g}" if values else ""


def _draw(found: Mapping[str, Sequence[Sequence[Line]]]) -> None:
    """Draw the held-out pass rate over the samples: thin lines for seeds, and their mean."""
    figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
    for name, runs in found.items():
        style: dict[str, Any] = {
            "color": COLORS[name.partition("/")[0]],
            "linestyle": "-" if "/" in name or name == "sync" else "--",
        }
        curves = [[_point(line) for line in lines if "eval/pass_rate" in line] for lines in runs]
        for points in curves:
            axes.plot(*zip(*points), linewidth=0.4, alpha=0.6, **style)
        mean = [tuple(map(fmean, zip(*points))) for points in zip(*curves)]
        axes.plot(*zip(*mean), linewidth=1.6, label=name, **style)
    axes.axhline(GOAL, color="black", linewidth=0.5)
    axes.set(xlabel="samples", ylabel="held-out pass rate", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize="small")
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    main()
