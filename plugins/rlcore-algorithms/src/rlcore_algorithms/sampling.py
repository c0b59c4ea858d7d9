"""Sampling methods of DAPO (arXiv 2503.14476): refill of groups without variance, and overlong penalty."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

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
    """Dynamic sampling: prompts whose responses all have the same reward are replaced by further prompts."""

    rounds: int = 0
    """Maximum number of rounds of generation in a step; 0: groups without variance are kept."""

    def __post_init__(self) -> None:
        require(self.rounds >= 0, "rounds", "0 (off) or more", self.rounds, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlongConfig:
    """Soft penalty on responses close to the token limit."""

    tokens: int = 0
    """Number of tokens before the limit over which the penalty grows; 0: no penalty."""
    factor: float = 1.0
    """Penalty at the limit."""

    def __post_init__(self) -> None:
        require(self.tokens >= 0, "tokens", "0 (off) or more", self.tokens, 128)
        require(self.tokens > 0 or self.factor == 1, "factor", "1 without overlong.tokens", self.factor, 1.0)
        require(self.factor > 0, "factor", "more than 0", self.factor, 1.0)


def refill(roles: Roles, prompts: Batch, draw: Callable[[Roles, Batch], Batch], config: RefillConfig) -> Batch:
    """Sample until there are as many groups with variance as prompts, or the last round is over."""
    wanted, kept, missing, rounds = len(prompts), [], len(prompts), 0
    while missing and rounds < config.rounds:
        samples = draw(roles, prompts if not rounds else roles.more_prompts(missing))
        reward, group_id = samples.fetch("reward", "group_id")
        varied = (group_variance(reward, group_id) > 0).numpy()
        kept.append(samples.take(np.flatnonzero(varied)))
        missing -= len(np.unique(group_id.numpy()[varied]))
        rounds += 1
    roles.note("experience/rounds", Mean(float(rounds)))
    roles.note("experience/groups", Mean(float(wanted - missing)))
    if missing:
        found = wanted - missing
        logger.warning("after %d rounds %d of %d prompts have groups with variance", rounds, found, wanted)
    return type(kept[0]).cat(kept)


def overlong_penalty(length: Tensor, limit: int, config: OverlongConfig) -> Tensor:
    """Return DAPO's penalty (eq. 13), [B] float32: 0 up to limit - tokens, then linear to -factor at limit."""
    beyond = length.double() - (limit - config.tokens)
    return (-config.factor * (beyond / config.tokens).clamp(0.0, 1.0)).to(torch.float32)
