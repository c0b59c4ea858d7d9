"""Rejection sampling: fine-tuning on the best of n responses (RAFT, arXiv 2304.06767; Llama 2, 2307.09288).

    kept = the response to a prompt with the highest reward, if that is at least `threshold` (when set)
    loss = -mean over tokens of the kept responses of  log p(token)

Departures:
1. `keep=passed` keeps every response with a reward of at least `threshold`, as in STaR (arXiv 2203.14465).
2. With keep=best, a prompt whose responses all have the same reward is skipped: none of them is the best.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rlcore.algorithms.base import Epochs, EpochsConfig
from rlcore.data.batch import Batch
from rlcore.errors import require
from rlcore.protocols.algorithm import RoleSpec
from rlcore.protocols.roles import Roles
from rlcore.types import Average, LossTerms, Mean, TokenOutputs
from rlcore_algorithms.online_dpo import best_and_worst
from rlcore_algorithms.sft import likelihood


@dataclass(frozen=True, slots=True, kw_only=True)
class BestOfNConfig(EpochsConfig):
    """Settings of rejection sampling."""

    keep: Literal["best", "passed"] = "best"
    threshold: float | None = None
    """Lowest reward of a kept response; None: no limit. Required with keep=passed."""
    average: Average = "token-mean"

    def __post_init__(self) -> None:
        EpochsConfig.__post_init__(self)
        passes = self.keep == "best" or self.threshold is not None
        require(passes, "threshold", "the lowest reward that passes, with keep=passed", self.threshold, 1.0)
        require(self.average != "row-mean", "average", "an average of terms per token", self.average, "token-mean")


class BestOfN(Epochs):
    """Fine-tuning on the best responses."""

    Config = BestOfNConfig
    corrects = True
    """A good response is a good example, whichever policy wrote it."""

    @property
    def compares_samples(self) -> bool:
        """True if a single sample of a prompt gives nothing to learn from."""
        return bool(self.config.keep == "best")

    def roles(self) -> Sequence[RoleSpec]:
        return [RoleSpec(name="actor", worker="policy"), RoleSpec(name="rollout", worker="rollout")]

    def reads(self) -> Mapping[str, Sequence[str]]:
        return {"actor": []}

    def writes(self) -> Sequence[str]:
        return []

    def collect(self, roles: Roles, prompts: Batch) -> Batch:
        """Generate, score, and keep the best."""
        samples = roles.score(roles.generate(prompts))
        reward, group_id = samples.fetch("reward", "group_id")
        rows = self.kept(reward, group_id)
        roles.note("experience/kept", Mean(float(len(rows))))
        return samples.take(rows).balance(roles.actor.dp_size)

    def kept(self, reward: Tensor, group_id: Tensor) -> Tensor:
        """Return the rows to train on, [K]."""
        candidates = best_and_worst(reward, group_id)[0::2] if self.compares_samples else torch.arange(len(reward))
        lowest = -torch.inf if self.config.threshold is None else self.config.threshold
        return candidates[reward[candidates] >= lowest]

    def loss(self, out: TokenOutputs, batch: Batch) -> LossTerms:
        return likelihood(out, self.config.average)
