"""What DAPO (arXiv 2503.14476) does to the samples before they are compared: refill, and a penalty for length."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlcore.algorithms.advantages import group_variance
from rlcore.data.batch import Batch
from rlcore.errors import require
from rlcore.protocols.roles import Roles
from rlcore.types import Mean

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RefillConfig:
    """Dynamic sampling: prompts whose responses all have one reward are replaced by further prompts."""

    rounds: int = 0
    """How often at most a step draws; 0: groups without variance are kept."""

    def __post_init__(self) -> None:
        require(self.rounds >= 0, "rounds", "0 (off) or more", self.rounds, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlongConfig:
    """Soft punishment of responses that come near the token limit."""

    tokens: int = 0
    """The last so many tokens before the limit, over which the penalty grows; 0: no penalty."""
    factor: float = 1.0
    """The penalty at the limit."""

    def __post_init__(self) -> None:
        require(self.tokens >= 0, "tokens", "0 (off) or more", self.tokens, 128)
        require(self.tokens > 0 or self.factor == 1, "factor", "1 without overlong.tokens", self.factor, 1.0)
        require(self.factor > 0, "factor", "more than 0", self.factor, 1.0)


def refill(
    roles: Roles,
    prompts: Batch,
    draw: Callable[[Any, Batch], Batch],
    config: RefillConfig,
    note: Callable[[str, Mean], None],
) -> Batch:
    """Samples of as many groups with variance as there are prompts, or fewer after the last round."""
    wanted, kept, missing, rounds = len(prompts), [], len(prompts), 0
    while missing and rounds < config.rounds:
        samples = draw(roles, prompts if not rounds else roles.more_prompts(missing))
        reward, group_id = samples.fetch("reward", "group_id")
        varied = (group_variance(reward, group_id) > 0).numpy()
        kept.append(samples.take(np.flatnonzero(varied)))
        missing -= len(np.unique(group_id.numpy()[varied]))
        rounds += 1
    note("experience/rounds", Mean(float(rounds)))
    note("experience/groups", Mean(float(wanted - missing)))
    if missing:
        logger.warning("after %d rounds %d of %d prompts have responses that differ", rounds, wanted - missing, wanted)
    return type(kept[0]).cat(kept)


def overlong_penalty(length: Tensor, limit: int, config: OverlongConfig) -> Tensor:
    """[B] float32, DAPO eq. 13: 0 up to limit - tokens, falling in a line to -factor at the limit."""
    beyond = length.double() - (limit - config.tokens)
    return (-config.factor * (beyond / config.tokens).clamp(0.0, 1.0)).to(torch.float32)
