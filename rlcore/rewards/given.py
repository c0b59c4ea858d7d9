"""Scores computed by other roles, as rewards that can be combined with others: `reward=[environment, length]`."""

from __future__ import annotations

import math


def environment(episode_reward: float) -> float | None:
    """Return the sum of the environment's rewards in an episode, or None if there were none.

    Example: rlcore train environment=calculator reward=environment
    """
    return None if math.isnan(episode_reward) else episode_reward


def model(model_score: float) -> float:
    """Return the score of the reward model in the directory `reward.model`.

    Example: rlcore train reward=model reward.model=outputs/RM/checkpoints/step_000100/actor
    """
    return model_score
