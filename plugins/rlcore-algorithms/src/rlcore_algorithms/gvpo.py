"""GVPO: group variance policy optimization, arXiv 2504.19599.

    loss = 1/2 · variance over the responses y of a prompt of  R(y) - beta · log [p(y) / p_old(y)]

with log p of a whole response, and the variance with divisor k - 1. Its gradient is -beta / (k - 1) · Σ w · ∇ log p(y),
w the centered value, and its minimum is the policy that maximizes R - beta · KL(p, p_old), whichever policy has sampled.
Departure: p_old is the policy before the step, so that each step moves on from the one before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rlcore.algorithms.base import Epochs, EpochsConfig
from rlcore.data.batch import Batch
from rlcore.errors import require
from rlcore.protocols import Unit
from rlcore.protocols.algorithm import RoleSpec
from rlcore.protocols.roles import Roles
from rlcore.types import LossTerms, TokenOutputs


@dataclass(frozen=True, slots=True, kw_only=True)
class GVPOConfig(EpochsConfig):
    """Settings of GVPO."""

    beta: float = 0.1
    """Strength of the pull toward the policy before the step."""

    def __post_init__(self) -> None:
        EpochsConfig.__post_init__(self)
        require(self.beta > 0, "beta", "more than 0", self.beta, 0.1)


class GVPO(Epochs):
    """Regression of log-ratios on rewards within each group."""

    Config = GVPOConfig
    compares_samples = True
    unit = Unit(column="group_id")
    corrects = True
    """The minimum of the loss does not depend on the policy that sampled."""

    def roles(self) -> Sequence[RoleSpec]:
        return [RoleSpec(name="actor", worker="policy"), RoleSpec(name="rollout", worker="rollout")]

    def reads(self) -> Mapping[str, Sequence[str]]:
        return {"actor": ["reward", *self.writes()]}

    def writes(self) -> Sequence[str]:
        return [] if self.on_policy else ["old_log_probs"]

    def collect(self, roles: Roles, prompts: Batch) -> Batch:
        """Generate, score, and recompute the log-probs if there are several updates."""
        samples = roles.score(roles.generate(prompts))
        if not self.on_policy:
            samples |= roles.actor.log_probs(samples).rename(log_probs="old_log_probs").drop("entropy")
        return samples

    def loss(self, out: TokenOutputs, batch: Batch) -> LossTerms:
        assert out.log_probs is not None, "the actor's outputs have log-probs"
        old = out.log_probs.detach() if self.on_policy else batch["old_log_probs"]
        log_ratio = batch.per_row(torch.where(batch["loss_mask"], out.log_probs - old, 0.0))
        value = batch["reward"].to(log_ratio.dtype) - self.config.beta * log_ratio
        sizes = torch.from_numpy(batch.unit_sizes()).to(value.device)
        centered = value - (batch.per_unit(value) / sizes).repeat_interleave(sizes)
        terms = 0.5 * batch.per_unit(centered**2) / (sizes - 1).clamp(min=1)
        return LossTerms(terms=terms, average="unit-mean", metrics={"log_ratio": log_ratio.detach()})
