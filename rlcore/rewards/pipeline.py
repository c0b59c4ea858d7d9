"""Combine the results of all rewards on a sample into an outcome, and convert outcomes to numbers for training.

Called by the executor (`combine`) and the reward worker (`final_rewards`). An outcome is a score, a skip, a timeout or an
error. Only a score is a number; the others become 0 only with `reward.on_error=zero`, which applies to failures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from rlcore.errors import SampleError
from rlcore.types import Mean, Metrics

Status = Literal["score", "skip", "timeout", "error"]
OnError = Literal["raise", "zero", "drop"]
LARGEST = (2 - 2**-23) * 2.0**127
"""Largest finite float32, the type of rewards in training."""


class RewardPart(NamedTuple):
    """Result of one reward for one sample. A tuple, since one is pickled for each sample and reward."""

    status: Status
    value: float | None = None
    message: str | None = None
    metrics: Mapping[str, float] = {}


def timed_out(timeout_s: float) -> RewardPart:
    """Return the result of a reward that did not answer."""
    return RewardPart("timeout", message=f"no answer within {timeout_s:g} s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Combined result of all rewards for one sample. Example: Outcome(status="score", value=0.5, parts={"math": 0.5})"""

    status: Status
    value: float | None = None
    """Weighted sum of the rewards that apply; None unless status is "score"."""
    parts: Mapping[str, float | None] = field(default_factory=dict)
    """Score by reward, before weighting; None: skipped or failed."""
    message: str | None = None
    """Reason why there is no score."""
    reward: str | None = None
    """Name of the first reward that failed."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """`<reward>/<metric>` -> value, from RewardResult."""
    sample_id: object = None
    prompt_id: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalRewards:
    """Outcomes as numbers, in the same order."""

    rewards: list[float]
    """NaN where `keep` is false."""
    keep: list[bool]
    counts: dict[str, int]
    """Number of samples by status."""
    metrics: Metrics
    """Means of `reward/<name>` and `reward/<name>/<metric>` over the samples that have them."""
    messages: list[str]
    """One line for each timeout and error."""


def combine(weights: Mapping[str, float], parts: Sequence[RewardPart], sample: Mapping[str, object]) -> Outcome:
    """Return the outcome of one sample; `parts` has one entry per reward, in the order of `weights`."""
    named = list(zip(weights, parts, strict=True))
    failed = next(((name, part) for name, part in named if part.status in ("timeout", "error")), None)
    scores = {name: weights[name] * part.value for name, part in named if part.value is not None}
    total = sum(scores.values())
    if failed is None and not abs(total) <= LARGEST:
        text = f"the weighted sum of the rewards is {total:.3g}, which is infinite in float32"
        failed = max(scores, key=lambda name: abs(scores[name])), RewardPart("error", message=text)
    status: Status = failed[1].status if failed else "score" if scores else "skip"
    return Outcome(
        status=status,
        value=total if status == "score" else None,
        parts={name: part.value for name, part in named},
        message=failed[1].message if failed else None,
        reward=failed[0] if failed else None,
        metrics={f"{name}/{metric}": value for name, part in named for metric, value in part.metrics.items()},
        sample_id=sample.get("sample_id"),
        prompt_id=sample.get("prompt_id"),
    )


def final_rewards(outcomes: Sequence[Outcome], on_error: OnError) -> FinalRewards:
    """Convert outcomes to rewards and count them. Skips are dropped; timeouts and errors are handled by `on_error`."""
    failures = [outcome for outcome in outcomes if outcome.status in ("timeout", "error")]
    if failures and on_error == "raise":
        raise SampleError(_stopped(failures, len(outcomes)))
    scored = ("score", "timeout", "error") if on_error == "zero" else ("score",)
    keep = [outcome.status in scored for outcome in outcomes]
    statuses = [outcome.status for outcome in outcomes]
    return FinalRewards(
        rewards=[(it.value or 0.0) if kept else float("nan") for it, kept in zip(outcomes, keep, strict=True)],
        keep=keep,
        counts={status: statuses.count(status) for status in _STATUSES},
        metrics=_metrics(outcomes),
        messages=[_describe(outcome) for outcome in failures],
    )


_STATUSES: tuple[Status, ...] = ("score", "skip", "timeout", "error")
_Values: TypeAlias = Mapping[str, float | None]


def _describe(outcome: Outcome) -> str:
    return f"reward {outcome.reward!r} on sample {outcome.sample_id} of prompt {outcome.prompt_id}: {outcome.message}"


def _stopped(failures: Sequence[Outcome], num_samples: int) -> str:
    more = f" ({len(failures)} of {num_samples} samples have no reward)" if len(failures) > 1 else ""
    advice = "Fix the reward, or drop such samples: reward.on_error=drop"
    if failures[0].status == "timeout":
        advice = "Increase reward.timeout_s=..., or drop such samples: reward.on_error=drop"
    return f"{_describe(failures[0])}{more}\n{advice}"


def _metrics(outcomes: Sequence[Outcome]) -> Metrics:
    metrics: Metrics = {}
    for outcome in outcomes:
        values: list[_Values] = [outcome.parts, outcome.metrics]
        for name, value in ((name, value) for group in values for name, value in group.items()):
            if value is not None:
                metrics[f"reward/{name}"] = metrics.get(f"reward/{name}", Mean(0.0, 0.0)) + Mean(value)
    return metrics
