"""Console output: a live panel on a terminal, one line per step otherwise, and a summary at the end.

Pure functions from a `State` to text; console.py decides when to draw.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rlcore.protocols.tracker import SampleRecord

_BLOCKS = "▁▂▃▄▅▆▇█"
_SHOWN = {
    "actor/kl_to_reference": "kl",
    "actor/entropy": "entropy",
    "actor/grad_norm": "grad norm",
    "actor/clip_fraction": "clipped",
    "actor/lr": "lr",
    "response_length/mean": "length",
    "actor/rollout_logprob_gap": "logprob gap",
    "reward/num_error": "reward errors",
    "reward/num_timeout": "reward timeouts",
}
_ONLY_WHEN_SET = ("reward/num_error", "reward/num_timeout")


@dataclass(slots=True)
class State:
    """Metrics and samples logged so far."""

    name: str
    total_steps: int
    shows: Mapping[str, str] = field(default_factory=dict)
    """Metric -> label, chosen by the algorithm."""
    step: int = 0
    first: tuple[int, float] | None = None
    """Step and time in seconds when the first step began; the pace excludes the start-up before it."""
    phase: str = ""
    elapsed_s: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)
    evals: list[tuple[int, float]] = field(default_factory=list)
    sample: SampleRecord | None = None

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a step; times are replaced by those of this step."""
        self.step = step
        spent = metrics.get("perf/step_s")
        begin = (step, self.elapsed_s) if spent is None else (step - 1, self.elapsed_s - spent)
        self.first = self.first or begin
        self.metrics = {name: value for name, value in self.metrics.items() if not name.startswith("time_s/")}
        self.metrics |= metrics
        if "reward/mean" in metrics:
            self.rewards.append(metrics["reward/mean"])
        if "eval/pass_rate" in metrics:
            self.evals.append((step, metrics["eval/pass_rate"]))

    @property
    def seconds_left(self) -> float | None:
        """Remaining seconds at the average pace."""
        step, seconds = self.first or (self.step, 0.0)
        done = self.step - step
        return (self.elapsed_s - seconds) / done * (self.total_steps - self.step) if done > 0 else None


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values as blocks from 0 (or the lowest) to 1 (or the highest), averaging them to `width` columns."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    columns = min(width, len(finite))
    cuts = [i * len(finite) // columns for i in range(columns + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(0.0, *means), max(1.0, *means)
    return "".join(_BLOCKS[min(7, int((value - low) / (high - low) * 8))] for value in means)


def duration(seconds: float | None) -> str:
    """Format seconds: 75.3 -> "1m15s"."""
    if seconds is None or not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def line(state: State) -> str:
    """Return one line for a step, for pipes and logs."""
    m = state.metrics
    width = len(str(state.total_steps))
    parts = [f"step {state.step:>{width}}/{state.total_steps}"]
    if state.rewards:
        parts.append(f"reward {state.rewards[-1]:.3f}")
    if state.evals:
        parts.append(f"eval {state.evals[-1][1]:.3f}")
    parts += [f"{label} {m[name]:.4g}" for name, label in state.shows.items() if name in m]
    if "actor/kl_to_reference" in m:
        parts.append(f"kl {m['actor/kl_to_reference']:.4f}")
    if "response_length/mean" in m:
        parts.append(f"length {m['response_length/mean']:.1f}")
    if "perf/tokens_per_second" in m:
        parts += [f"{thousands(m['perf/tokens_per_second'])} tok/s", f"{m['perf/step_s']:.2f} s"]
    if "schedule/staleness_mean" in m:
        waits = m.get("time_s/wait for samples", 0.0) / m["perf/step_s"]
        parts += [f"staleness {m['schedule/staleness_mean']:.1f}", f"waits {waits:.0%}"]
    if state.step and state.step < state.total_steps:
        parts.append(f"left {duration(state.seconds_left)}")
    return "  ".join(parts)


def thousands(value: float) -> str:
    """Format a number: 15300 -> "15.3k"."""
    return f"{value / 1000:.1f}k" if value >= 1000 else f"{value:.0f}"


def panel(state: State, width: int) -> RenderableType:
    """Return the live display."""
    inner = max(20, width - 6)
    left = duration(state.seconds_left) if state.step else "?"
    head = Text.assemble(
        (f"step {state.step}/{state.total_steps}", "bold"),
        f"   {duration(state.elapsed_s)} elapsed, {left} left   ",
        (state.phase, "dim"),
        no_wrap=True,
        overflow="ellipsis",
    )
    filled = inner * state.step // max(1, state.total_steps)
    bar = Text.assemble(("━" * filled, "blue"), ("━" * (inner - filled), "bright_black"))
    body: list[RenderableType] = [head, bar]
    body += [_reward(state, inner), _numbers(state), _phases(state, inner)]
    if state.sample is not None:
        body.append(_sample(state.sample, inner))
    return Panel(Group(*body), title=Text(state.name), border_style="blue", width=width)


def _reward(state: State, width: int) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    if state.rewards:
        recent = state.rewards[-10:]
        text.append(f"reward {sum(recent) / len(recent):.3f} ", "bold green")
        text.append(sparkline(state.rewards, max(10, width - 34)), "green")
    if state.evals:
        text.append(f"  eval {state.evals[0][1]:.2f} → {state.evals[-1][1]:.2f}", "cyan")
    return text


def _numbers(state: State) -> Text:
    m = state.metrics
    parts = [f"{thousands(m['perf/tokens_per_second'])} tok/s"] if "perf/tokens_per_second" in m else []
    for name, label in {**state.shows, **_SHOWN}.items():
        if name in m and (m[name] or name not in _ONLY_WHEN_SET):
            parts.append(f"{label} {m[name]:.3g}")
    return Text("   ".join(parts), style="dim")


def _phases(state: State, width: int) -> Table:
    """Return a table with the seconds of each phase of the last step."""
    spent = {
        n.removeprefix("time_s/"): v for n, v in state.metrics.items() if n.startswith("time_s/") and "eval" not in n
    }
    table = Table.grid(padding=(0, 1))
    total = max(state.metrics.get("perf/step_s", 0.0), sum(spent.values()), 1e-9)
    for name, seconds in sorted(spent.items(), key=lambda item: -item[1]):
        bar = "█" * max(1, round(seconds / total * max(8, width - 40)))
        table.add_row(Text(name), Text(f"{seconds:.3f} s", justify="right"), Text(bar, style="blue"))
    return table


def _sample(sample: SampleRecord, width: int) -> Text:
    score = "no reward" if sample.reward is None else f"reward {sample.reward:.2f}"
    text = Text.assemble((f"sample of step {sample.step}: ", "dim"), (score, "bold"), "\n")
    text.append(shorten(sample.prompt, 2 * width), "dim")
    text.append(" → ")
    text.append(shorten(sample.completion, 3 * width))
    return text


def shorten(text: str, limit: int) -> str:
    """Replace unprintable characters, and cut the middle out of a long text."""
    printable = "".join(c if c.isprintable() else {"\n": "⏎", "\t": " "}.get(c, "·") for c in text)
    if len(printable) <= limit:
        return printable
    half = (limit - 3) // 2
    return f"{printable[:half]} … {printable[-half:]}"


def summary(facts: Mapping[str, object]) -> RenderableType:
    """Return the final panel; `facts` come from `rlcore.trainer.summary`, and any of them may be missing."""
    table = Table.grid(padding=(0, 2))
    error = facts.get("error")
    if error:
        table.add_row("error", Text(str(error), overflow="fold"))
    steps = f"{facts.get('steps', '?')} of {facts.get('total_steps', '?')} in {duration(_number(facts, 'seconds'))}"
    table.add_row("steps", Text(f"{steps}, {int(_number(facts, 'tokens') or 0):,} tokens"))
    for label, key in (("reward", "reward"), ("held-out pass rate", "eval")):
        first, last = _number(facts, f"{key}_first"), _number(facts, f"{key}_last")
        if first is not None and last is not None:
            table.add_row(label, Text(f"{first:.3f} → {last:.3f}", style="bold green"))
    for label, key in (("metrics", "metrics_path"), ("samples", "samples_path"), ("checkpoint", "checkpoint")):
        if key in facts:
            table.add_row(label, Text(str(facts[key]), overflow="fold"))
    unfinished = error is not None or facts.get("steps") != facts.get("total_steps")
    command = ("continue", "resume_command") if unfinished else ("try next", "next_command")
    for label, key in (command, ("see the run", "report_command")):
        if key in facts:
            table.add_row(label, Text(str(facts[key]), style="bold", overflow="fold"))
    title = Text("ended early" if error else "stopped early" if unfinished else "done")
    return Panel(table, title=title, border_style="red" if error else "yellow" if unfinished else "green")


def _number(facts: Mapping[str, object], key: str) -> float | None:
    value = facts.get(key)
    return float(value) if isinstance(value, (int, float)) else None
