"""`rlcore compare RUN RUN…`: what differs between runs, and whether the differences exceed the noise."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from rlcore.cli import make_parser
from rlcore.errors import ConfigError
from rlcore_report.evaluations import changed
from rlcore_report.noise import Variant, difference, differing, result, variants
from rlcore_report.run import RecordedRun, read_run
from rlcore_report.show import curve

_EXAMPLES = """\
examples:
  rlcore compare outputs/ONE outputs/OTHER
  rlcore compare outputs/ONE-* outputs/OTHER-*       several seeds of each, to measure the noise
  rlcore report outputs/ONE outputs/OTHER -o both.html    their curves on one page
"""
_COMPARED = (
    "eval/pass_rate",
    "eval/pass_at_k",
    "eval/reward",
    "reward/mean",
    "response_length/mean",
    "actor/entropy",
    "perf/tokens_per_second",
)
_MOST_PROMPTS = 8


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    parser = make_parser("compare", "Compare runs: settings, results, and the noise between seeds.", _EXAMPLES)
    parser.add_argument("runs", nargs="+", type=Path, metavar="run", help="directories of two or more runs")
    options = parser.parse_args(list(argv))
    if len(options.runs) < 2:
        raise ConfigError(f"one run cannot be compared\nType  rlcore compare {options.runs[0]} OTHER")
    Console(highlight=False).print(comparison([read_run(directory) for directory in options.runs]))
    return 0


def comparison(runs: Sequence[RecordedRun]) -> RenderableType:
    """Return the settings that differ, the results, and the differences between variants."""
    groups = variants(runs)
    parts: list[RenderableType] = [_settings(runs), Text(), _results(runs)]
    if len(groups) == 1:
        parts.append(Text("\nAll runs have the same settings, apart from the seed: their differences are noise."))
    for one, other in combinations(groups, 2):
        parts += [Text(), _differences(one, other), *_prompts(one.runs[0], other.runs[0])]
    return Group(*parts)


def _settings(runs: Sequence[RecordedRun]) -> RenderableType:
    found = {name: values for name, values in differing(runs).items() if name not in ("run.name", "run.directory")}
    if not found:
        return Text("All settings are equal.")
    table = Table("setting that differs", *(escape(run.name) for run in runs), box=None, pad_edge=False)
    for name, values in found.items():
        table.add_row(Text(name), *map(Text, values))
    return table


def _results(runs: Sequence[RecordedRun]) -> Table:
    """Return the result of each run: the last evaluation, or the mean of the recent steps, with its curve."""
    table = Table(
        "result", *(escape(f"{run.name} ({run.state}, step {run.step})") for run in runs), box=None, pad_edge=False
    )
    for name in _COMPARED:
        cells = []
        for run in runs:
            value, values = result(run, name), [value for _, value in run.metrics.known(name)]
            cells.append(Text("–") if value is None else Text.assemble(f"{value:.4g} ", (curve(values, 16), "green")))
        if any(str(cell) != "–" for cell in cells):
            table.add_row(Text(name), *cells)
    return table


def _differences(one: Variant, other: Variant) -> Table:
    table = Table(escape(f"{one.label} → {other.label}"), "difference", "", box=None, pad_edge=False)
    for name in _COMPARED:
        found = difference(one, other, name)
        if found is not None:
            table.add_row(Text(name), f"{found.second - found.first:+.4g}", Text(found.finding))
    return table


def _prompts(one: RecordedRun, other: RecordedRun) -> list[RenderableType]:
    """Return the held-out prompts that only one of two runs passes at its last evaluation."""
    lists = changed(one, other)
    if lists is None:
        return []
    lines: list[RenderableType] = []
    for label, prompts in zip((f"only {other.name} passes", f"only {one.name} passes"), lists):
        lines.append(Text(f"\nheld-out prompts that {label}: {len(prompts)}", style="bold"))
        lines += [Text(f"  {text[:100]!r}") for text in prompts[:_MOST_PROMPTS]]
    return lines
