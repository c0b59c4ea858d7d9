"""DAPO: decoupled clip and dynamic sampling, arXiv 2503.14476.

1. Clip-higher: the ratio is clipped to [1 - 0.2, 1 + 0.28].
2. Dynamic sampling: prompts whose responses all have one reward are replaced by further prompts (`refill.rounds`).
3. Token-level loss: the mean is over all tokens of the mini-batch.
4. Overlong shaping: -factor · clamp((length - (limit - tokens)) / tokens, 0, 1) is added to the reward (eq. 13); the
   limit is sampling.max_response_tokens. Off until `overlong.tokens` is given: how many depends on the task.

Departures:
1. A round draws as many prompts as are missing, so no group with variance is thrown away; the paper draws full batches.
2. After the last round the step goes on with the groups that there are. `experience/groups` counts them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rlcore_algorithms.family import Family, FamilyConfig
from rlcore_algorithms.sampling import RefillConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DAPOConfig(FamilyConfig):
    """Settings of DAPO."""

    clip_high: float = 0.28
    refill: RefillConfig = field(default_factory=lambda: RefillConfig(rounds=10))


class DAPO(Family):
    """GRPO on groups that have something to say."""

    Config = DAPOConfig
