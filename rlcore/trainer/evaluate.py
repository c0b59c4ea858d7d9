"""Held-out evaluation: the same rollout and rewards on other prompts, usually with greedy sampling."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rlcore.types import Sampling

if TYPE_CHECKING:
    from rlcore.data.batch import Batch
    from rlcore.protocols.algorithm import EvalConfig
    from rlcore.trainer.roles import Roles


def evaluate(roles: Roles, prompts: Batch, config: EvalConfig) -> tuple[dict[str, float], Any]:
    """Score held-out prompts.

    Returns:
        Metrics `eval/reward` (mean), `eval/pass_rate`, `eval/pass_at_k`, `eval/samples`, `eval/response_length`; and the
        scored samples. A sample without a score counts as not passed, is excluded from the mean, and is counted in
        `eval/unscored`. A failing reward ends the evaluation if `reward.on_error=raise`, and is logged otherwise.
    """
    n = config.samples_per_prompt
    sampling: Sampling = replace(roles.sampling, temperature=config.temperature)
    samples = roles.rollout.generate(prompts, sampling, n)
    scored = roles.compute_rewards(samples)
    roles.final_rewards(scored)
    reward, status, length = scored.fetch("reward", "reward_status", "num_loss_tokens")
    has_score = (status == 0).numpy()
    values = reward.numpy()
    passed = (has_score & (values >= config.pass_threshold)).reshape(-1, n)
    metrics = {
        "eval/reward": float(values[has_score].mean()) if has_score.any() else float("nan"),
        "eval/pass_rate": float(passed.mean()),
        "eval/samples": float(len(values)),
        "eval/response_length": float(length.double().mean()),
    }
    if n > 1:
        metrics["eval/pass_at_k"] = float(passed.any(axis=1).mean())
    if not has_score.all():
        metrics["eval/unscored"] = float(np.sum(~has_score))
    return metrics, scored
