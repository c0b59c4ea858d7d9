"""Warnings about a run: metrics outside their healthy range, and known failure modes.

`recent` is the last tenth of a run, at least five steps: a single odd step is noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from rlcore_report.run import Metrics, RecordedRun
from rlcore_report.table import explanation

Level = Literal["bad", "warning", "note"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A finding about a run. Example: Finding(level="warning", title="Entropy has collapsed", text="…")"""

    level: Level
    title: str
    text: str
    metric: str = ""
    """Metric on which the finding is based."""


def findings(run: RecordedRun) -> list[Finding]:
    """Return the findings about a run, the most severe first."""
    found = [finding for check in _CHECKS for finding in check(run)]
    covered = {finding.metric for finding in found}
    found += [finding for finding in _out_of_range(run.metrics) if finding.metric not in covered]
    return sorted(found, key=lambda it: ("bad", "warning", "note").index(it.level))


def first_and_recent(metrics: Metrics, name: str) -> tuple[float, float] | None:
    """Return the means of a metric at the start and in the recent steps; None for fewer than ten values."""
    values = [value for _, value in metrics.known(name)]
    if len(values) < 10:
        return None
    window = max(5, len(values) // 10)
    return fmean(values[:window]), fmean(values[-window:])


def _ended_badly(run: RecordedRun) -> Iterator[Finding]:
    if run.state == "crashed":
        yield Finding(level="bad", title="The run crashed", text=str(run.summary.get("error", "")))
    elif run.state == "killed":
        text = f"Its process ended after step {run.step} without an error message. {_resume(run)}"
        yield Finding(level="bad", title="The run was killed", text=text)
    elif run.state == "stopped":
        text = f"A signal ended it after step {run.step} of {run.total_steps}. {_resume(run)}"
        yield Finding(level="note", title="The run was stopped", text=text)


def _resume(run: RecordedRun) -> str:
    return f"Continue with:  {run.summary.get('resume_command') or f'rlcore train {run.directory}'}"


def _entropy_collapse(run: RecordedRun) -> Iterator[Finding]:
    entropy, reward = (first_and_recent(run.metrics, name) for name in ("actor/entropy", "reward/mean"))
    if entropy is None or entropy[1] >= 0.15 * entropy[0] or reward is None:
        return
    best = max(value for _, value in run.metrics.known("reward/mean"))
    if reward[1] < 0.9 * best or reward[1] <= reward[0]:
        text = f"It fell from {entropy[0]:.3g} to {entropy[1]:.3g} nats while the reward is {reward[1]:.3g}: the policy"
        text += " no longer explores. Raise entropy_coefficient or clip_high, or lower optimizer.lr."
        yield Finding(level="warning", title="Entropy has collapsed", text=text, metric="actor/entropy")


def _kl_growth(run: RecordedRun) -> Iterator[Finding]:
    values = [value for _, value in run.metrics.known("actor/kl_to_reference")]
    if len(values) < 20:
        return
    middle, recent = fmean(values[len(values) // 2 - 5 : len(values) // 2 + 5]), fmean(values[-10:])
    if recent > 0.1 and recent > 3 * middle:
        text = f"It tripled in the second half of the run, to {recent:.3g} nats per token."
        text += " Raise kl.coefficient, or lower optimizer.lr."
        yield Finding(
            level="warning", title="KL to the reference keeps growing", text=text, metric="actor/kl_to_reference"
        )


def _alike(run: RecordedRun) -> Iterator[Finding]:
    """Warn if the rewards are equal within most groups, so that nothing is learned from them, and give the reason."""
    shares = _zero_variance_shares(run.metrics)[-max(5, len(run.metrics.steps) // 10) :]
    if len(shares) < 5 or fmean(shares) < 0.8:
        return
    rewards = [value for _, value in run.metrics.known("reward/mean")]
    spread = [value for _, value in run.metrics.known("reward/std")]
    recent = fmean(rewards[-len(shares) :] or [0.0])
    high = recent >= 0.9 * max(rewards, default=0.0) and recent > 0
    same = fmean(spread[-len(shares) :] or [0.0]) <= 0.25 * max(spread, default=0.0)
    name = "experience/zero_variance_rows"
    about = f"In {fmean(shares):.0%} of the recent samples, the whole group has the same reward"
    if high and same:
        text = f"{about}, {recent:.3g} on average. There is little left to learn from these prompts: use harder ones."
        yield Finding(level="note", title="Rewards are saturated", text=text, metric=name)
    else:
        text = (
            f"{about}, so nothing is learned from them. Use easier prompts, more samples_per_prompt, or a finer reward."
        )
        yield Finding(level="warning", title="All rewards of a group are equal", text=text, metric=name)


def _zero_variance_shares(metrics: Metrics) -> list[float]:
    """Return, per step, the fraction of samples in groups with equal rewards."""
    equal = metrics.columns.get("experience/zero_variance_rows", ())
    scored = metrics.columns.get("reward/num_score", ())
    return [e / s for e, s in zip(equal, scored) if e is not None and s]


def _no_progress(run: RecordedRun) -> Iterator[Finding]:
    reward = first_and_recent(run.metrics, "reward/mean")
    deviation = first_and_recent(run.metrics, "reward/std")
    if len(run.metrics.steps) < 50 or reward is None or deviation is None:
        return
    if reward[1] - reward[0] <= 0.02 * deviation[0]:
        text = f"It was {reward[0]:.3g} in the first steps and is {reward[1]:.3g} now."
        yield Finding(level="warning", title="The reward does not rise", text=text, metric="reward/mean")


def _exploits(run: RecordedRun) -> Iterator[Finding]:
    rates, reward = run.metrics.known("eval/pass_rate"), first_and_recent(run.metrics, "reward/mean")
    if len(rates) < 3 or reward is None:
        return
    best_step, best = max(rates, key=lambda it: it[1])
    if best - rates[-1][1] > 0.1 and reward[1] >= reward[0]:
        text = f"The held-out pass rate was {best:.3g} at step {best_step} and is {rates[-1][1]:.3g}, while the reward"
        text += " did not fall: the policy exploits the reward or overfits. Read samples with high rewards."
        yield Finding(level="warning", title="Held-out results fall", text=text, metric="eval/pass_rate")


def _waits(run: RecordedRun) -> Iterator[Finding]:
    ahead = "time_s/wait for samples" in run.metrics.columns  # generation then overlaps with training
    name = "time_s/wait for samples" if ahead else "time_s/rollout.generate"
    generate, step = (first_and_recent(run.metrics, it) for it in (name, "perf/step_s"))
    if generate is None or step is None or not step[1] or generate[1] < 0.8 * step[1]:
        return
    text = f"In {generate[1] / step[1]:.0%} of a step, the trainer waits for generation."
    text += " Use a faster engine, more devices for it, or shorter responses."
    yield Finding(level="note", title="The trainer waits for samples", text=text, metric=name)


def _out_of_range(metrics: Metrics) -> Iterator[Finding]:
    """Warn about metrics whose recent values are outside their healthy range."""
    for name in metrics.columns:
        row = explanation(name)
        values = [value for _, value in metrics.known(name)][-max(5, len(metrics.steps) // 10) :]
        if row is None or not values or (row.low is None and row.high is None):
            continue
        mean = fmean(values)
        if row.high is not None and mean > row.high:
            side = f"above {row.high:g}"
        elif row.low is not None and mean < row.low:
            side = f"below {row.low:g}"
        else:
            continue
        text = f"{mean:.3g} on average in the last {len(values)} values. {row.advice}"
        yield Finding(level="warning", title=f"{name} is {side}", text=text, metric=name)


_CHECKS: tuple[Callable[[RecordedRun], Iterator[Finding]], ...] = (
    _ended_badly,
    _entropy_collapse,
    _kl_growth,
    _alike,
    _no_progress,
    _exploits,
    _waits,
)
