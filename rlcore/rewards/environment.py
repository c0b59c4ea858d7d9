"""The reward of an environment, beside which others may stand: `reward=[environment, length]`."""

from __future__ import annotations

import math


def environment(episode_reward: float) -> float | None:
    """The sum of what the environment gave in an episode; None when it gave nothing.

    Example: rlcore train environment=calculator reward=environment
    """
    return None if math.isnan(episode_reward) else episode_reward
