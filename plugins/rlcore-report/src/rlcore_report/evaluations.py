"""Held-out prompts over time, from recorded evaluation samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlcore_report.run import RecordedRun


def last_evaluation(run: RecordedRun) -> dict[str, bool]:
    """Return prompt -> whether one of its samples passed, at the last recorded evaluation."""
    samples = [sample for sample in run.samples if sample.get("kind") == "evaluation"]
    last = max((sample["step"] for sample in samples), default=None)
    passed: dict[str, bool] = {}
    for sample in samples:
        if sample["step"] == last:
            prompt = str(sample.get("prompt"))
            passed[prompt] = passed.get(prompt, False) or _passes(run.config, sample)
    return passed


def changed(one: RecordedRun, other: RecordedRun) -> tuple[list[str], list[str]] | None:
    """Return the prompts that only `other` passes and those that only `one` passes; None without recorded evaluations."""
    before, after = last_evaluation(one), last_evaluation(other)
    if not before or not after:
        return None
    both = before.keys() & after.keys()
    won = sorted(prompt for prompt in both if after[prompt] and not before[prompt])
    return won, sorted(prompt for prompt in both if before[prompt] and not after[prompt])


def _passes(config: Mapping[str, Any], sample: Mapping[str, Any]) -> bool:
    threshold = config.get("eval.pass_threshold", 1.0)
    reward = sample.get("reward")
    return isinstance(reward, int | float) and isinstance(threshold, int | float) and reward >= threshold
