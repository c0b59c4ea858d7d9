"""Scores that other roles have given, as rewards beside which others may stand: `reward=[environment, length]`."""

from __future__ import annotations

import math


def environment(episode_reward: float) -> float | None:
    """The sum of what the environment gave in an episode; None when it gave nothing.

    Example: rlcore train environment=calculator reward=environment
    """
    return None if math.isnan(episode_reward) else episode_reward


def model(model_score: float) -> float:
    """What the reward model says, whose directory is `reward.model`.

    Example: rlcore train reward=model reward.model=outputs/RM/checkpoints/step_000100/actor
    """
    return model_score
