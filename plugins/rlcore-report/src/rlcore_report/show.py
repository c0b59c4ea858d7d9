"""`rlcore show RUN`: a run on one terminal screen."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rlcore.cli import make_parser
from rlcore_report.findings import findings
from rlcore_report.run import RecordedRun, read_run
from rlcore_report.table import in_order

_EXAMPLES = """\
examples:
  rlcore show outputs/NAME            state, result, warnings, metrics and samples
  rlcore show outputs/NAME --all      every metric
"""
_COLORS = {"running": "cyan", "finished": "green", "stopped": "yellow", "unknown": "yellow"}
_LEVELS = {"bad": "bold red", "warning": "yellow", "note": "cyan"}
_MAIN = (
    "reward/mean",
    "eval/pass_rate",
    "eval/pass_at_k",
    "actor/entropy",
    "actor/kl_to_reference",
    "actor/kl_to_old",
    "actor/clip_fraction",
    "actor/grad_norm",
    "actor/rollout_logprob_gap",
    "response_length/mean",
    "response_length/truncated",
    "perf/step_s",
    "perf/tokens_per_second",
)
_BLOCKS = "▁▂▃▄▅▆▇█"
_CURVE = 20


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    parser = make_parser("show", "Show a run on one terminal screen.", _EXAMPLES)
    parser.add_argument("run", type=Path, help="directory of a run")
    parser.add_argument("--all", action="store_true", help="show every metric, not only the main ones")
    options = parser.parse_args(list(argv))
    Console(highlight=False).print(screen(read_run(options.run), every_metric=options.all))
    return 0


def screen(run: RecordedRun, *, every_metric: bool = False) -> RenderableType:
    """Return one terminal screen: state, warnings, metrics, a good sample and a bad one."""
    names = [*run.metrics.columns] if every_metric else [it for it in (*run.shows, *_MAIN) if run.metrics.known(it)]
    parts: list[RenderableType] = [_head(run), *_remarks(run), _metrics(run, in_order(dict.fromkeys(names)))]
    parts += [_samples(run)] if run.samples else []
    parts += [Text(f"note: {note}", style="dim") for note in run.notes]
    parts.append(
        Text(f"rlcore report {shlex.quote(str(run.directory))}     writes a page with curves and samples", "dim")
    )
    color = _COLORS.get(run.state, "red")
    return Panel(Group(*parts), title=Text(f"{run.name}: {run.state}"), border_style=color)


def _head(run: RecordedRun) -> Table:
    table = Table.grid(padding=(0, 2))
    of = f" of {run.total_steps}" if run.total_steps is not None else ""
    seconds = run.summary.get("seconds")
    time = f", {seconds:.0f} s in steps" if isinstance(seconds, int | float) else ""
    table.add_row("steps", Text(f"{run.step}{of}{time}"))
    for label, names in _FACTS.items():
        own = [key for name in names for key in run.config if key == name or key.startswith(f"{name}.")]
        values = [str(run.config[key]) for key in own if run.config[key] not in (None, "")]
        if values:
            table.add_row(label, Text(" ".join(values), overflow="fold"))
    if run.versions:
        table.add_row("versions", Text(", ".join(f"{name} {version}" for name, version in run.versions.items())))
    return table


_FACTS: Mapping[str, Sequence[str]] = {
    "model": ("model.path",),
    "data": ("data.train",),
    "method": ("algorithm.name", "backend.name", "rollout.name", "runtime.name"),
}


def _remarks(run: RecordedRun) -> Iterator[Text]:
    for finding in findings(run):
        yield Text.assemble((f"{finding.level}: {finding.title}. ", _LEVELS[finding.level]), finding.text)


def _metrics(run: RecordedRun, names: Sequence[str]) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("metric", no_wrap=True)
    for label in ("first", "last", "min", "max"):
        table.add_column(label, justify="right", no_wrap=True)
    table.add_column("curve", no_wrap=True)
    for name in names:
        values = [value for _, value in run.metrics.known(name)]
        if values:
            shown = [f"{value:.3g}" for value in (values[0], values[-1], min(values), max(values))]
            table.add_row(Text(name), *shown, Text(curve(values), style="green"))
    return table


def curve(values: Sequence[float], width: int = _CURVE) -> str:
    """Draw values between their lowest and highest as blocks, averaging them to at most `width` columns."""
    columns = min(width, len(values))
    if not columns:
        return ""
    cuts = [i * len(values) // columns for i in range(columns + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, span = min(means), max(means) - min(means)
    return "".join(_BLOCKS[min(7, int((value - low) / span * 8)) if span else 0] for value in means)


def _samples(run: RecordedRun) -> Table:
    """Return the best and the worst of the latest samples."""
    table = Table.grid(padding=(0, 1))
    scored = [it for it in run.samples[-64:] if isinstance(it.get("reward"), int | float)]
    if not scored:
        return table
    best, worst = max(scored, key=lambda it: it["reward"]), min(scored, key=lambda it: it["reward"])
    for label, sample in (("best", best), ("worst", worst)):
        text = f"{_one_line(sample.get('prompt'), 80)} → {_one_line(sample.get('completion'), 160)}"
        table.add_row(label, f"{sample['reward']:.3g}", Text(text))
    return table


def _one_line(value: object, limit: int) -> str:
    """Return the text in one line without control characters, shortened in the middle."""
    text = "".join(c if c.isprintable() else "⏎" if c == "\n" else "·" for c in str(value))
    return text if len(text) <= limit else f"{text[: limit // 2]} … {text[-limit // 2 :]}"
