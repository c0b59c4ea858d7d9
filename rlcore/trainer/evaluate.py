"""Held-out evaluation: the same rollout and rewards, other prompts, usually greedy."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rlcore.types import Sampling

if TYPE_CHECKING:
    from rlcore.trainer.run import Run


def evaluate(run: Run) -> dict[str, float]:
    """Score held-out prompts; metrics `eval/reward` (mean), `eval/pass_rate`, `eval/pass_at_k`, `eval/samples`.

    A sample without a score counts as not passed and is left out of the mean; `eval/unscored` says how many.
    """
    if run.eval_prompts is None:
        return {}
    config = run.config.eval
    n = config.samples_per_prompt
    sampling: Sampling = replace(run.roles.sampling, temperature=config.temperature)
    samples = run.roles.rollout.generate(run.eval_prompts, sampling, n)
    reward, status, length = (samples | run.roles.reward.score(samples)).fetch(
        "reward", "reward_status", "num_loss_tokens"
    )
    scored = (status == 0).numpy()
    values = reward.numpy()
    passed = (scored & (values >= config.pass_threshold)).reshape(-1, n)
    metrics = {
        "eval/reward": float(values[scored].mean()) if scored.any() else float("nan"),
        "eval/pass_rate": float(passed.mean()),
        "eval/samples": float(len(values)),
        "eval/response_length": float(length.double().mean()),
    }
    if n > 1:
        metrics["eval/pass_at_k"] = float(passed.any(axis=1).mean())
    if not scored.all():
        metrics["eval/unscored"] = float(np.sum(~scored))
    return metrics
