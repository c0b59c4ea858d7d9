"""Decide whether runs differ by more than the noise, which runs with equal settings but different seeds measure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance

from rlcore_report.findings import first_and_recent
from rlcore_report.run import RecordedRun

_OF_THE_RUN = ("run.", "trackers", "plugins.", "runtime.", "checkpoint.")
"""Settings that do not change what is learned."""
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
"""Two-sided 95 % points of Student's t for 1, 2, … degrees of freedom; 2 beyond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Runs with equal settings, apart from the seed."""

    label: str
    runs: Sequence[RecordedRun]

    def results(self, metric: str) -> list[float]:
        """Return the result of each run that has the metric."""
        return [value for run in self.runs if (value := result(run, metric)) is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Comparison of a metric between two variants."""

    first: float
    second: float
    noise: float | None
    """Difference that chance alone exceeds in 5 % of the cases; None: unknown."""
    source: str
    """Source of the noise: seeds or held-out samples."""

    @property
    def finding(self) -> str:
        """Describe in words what the difference means."""
        if self.noise is None:
            return f"noise unknown: {self.source}"
        exceeds = abs(self.second - self.first) > self.noise
        return f"{'exceeds' if exceeds else 'is within'} the noise of ±{self.noise:.2g} ({self.source})"


def differing(runs: Sequence[RecordedRun]) -> dict[str, list[str]]:
    """Return setting -> its value in each run as JSON, for settings that differ."""
    names = sorted({name for run in runs for name in run.config})
    values = {name: [json.dumps(run.config.get(name), default=str) for run in runs] for name in names}
    return {name: found for name, found in values.items() if len(set(found)) > 1}


def variants(runs: Sequence[RecordedRun]) -> list[Variant]:
    """Group runs whose settings differ only in the seed and in what does not affect learning."""
    groups: dict[str, list[RecordedRun]] = {}
    for run in runs:
        kept = {name: value for name, value in run.config.items() if not name.startswith(_OF_THE_RUN)}
        groups.setdefault(json.dumps(kept, sort_keys=True, default=str), []).append(run)
    return [Variant(label=" + ".join(run.name for run in group), runs=group) for group in groups.values()]


def result(run: RecordedRun, metric: str) -> float | None:
    """Return the last value of an evaluation, otherwise the mean of the recent steps."""
    values = run.metrics.known(metric)
    if not values:
        return None
    window = first_and_recent(run.metrics, metric)
    return values[-1][1] if metric.startswith("eval/") or window is None else window[1]


def difference(one: Variant, other: Variant, metric: str) -> Difference | None:
    """Compare a metric of two variants; None if one of them lacks it."""
    a, b = one.results(metric), other.results(metric)
    if not a or not b:
        return None
    noise, source = _noise(one, other, metric, {"a": a, "b": b})
    return Difference(first=fmean(a), second=fmean(b), noise=noise, source=source)


def _noise(one: Variant, other: Variant, metric: str, found: Mapping[str, Sequence[float]]) -> tuple[float | None, str]:
    """Return the 95 % noise of a difference: between seeds if there are several, else of the held-out samples."""
    a, b = found["a"], found["b"]
    if len(a) > 1 and len(b) > 1:  # Welch's test
        parts = [variance(a) / len(a), variance(b) / len(b)]
        total = sum(parts)
        below = parts[0] ** 2 / (len(a) - 1) + parts[1] ** 2 / (len(b) - 1)
        freedom = int(total**2 / below + 1e-9) if below else len(a) + len(b) - 2
        t = _T[freedom - 1] if freedom <= len(_T) else 2.0
        return t * math.sqrt(total), f"between {len(a)} and {len(b)} seeds"
    if metric in ("eval/pass_rate", "eval/pass_at_k"):
        counts = [result(variant.runs[0], "eval/samples") for variant in (one, other)]
        error = sum(p * (1 - p) / n for p, n in zip((a[0], b[0]), counts) if n)
        return 2.0 * math.sqrt(error), "of the held-out samples only; other seeds may differ more"
    return None, "give more seeds of each, such as  run.seed=1"
