"""DAPO: decoupled clip and dynamic sampling, arXiv 2503.14476.

1. Clip-higher: the ratio is clipped to [1 - 0.2, 1 + 0.28].
2. Dynamic sampling: prompts whose responses all have the same reward are replaced by further prompts
   (`refill.rounds`).
3. Token-level loss: the mean is over all tokens of the mini-batch.
4. Overlong shaping (eq. 13): -factor · clamp((length - (limit - tokens)) / tokens, 0, 1) is added to the
   reward; the limit is sampling.max_response_tokens. Off until `overlong.tokens` is set for the task.

Departures:
1. A round takes as many prompts as are missing, so no group with variance is discarded; the paper takes full
   batches.
2. After the last round the step continues with the groups it has; `experience/groups` counts them.
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
    """GRPO on groups with variance."""

    Config = DAPOConfig
