"""Clip-cov and KL-cov: restraint of the tokens that make the entropy collapse, arXiv 2505.22617.

    cov_t = (log p(t) - mean of log p) · (A_t - mean of A),   means over all loss tokens of the step

clip_cov: a random `share` of all tokens, chosen among those with cov_low <= cov <= cov_high, gets no
gradient; otherwise the loss is PPO's clipped loss.
kl_cov: the `share` of all tokens with the largest cov gets the penalty `penalty` · |log p - log p_old|, added
to the unclipped loss -ratio · A.

Departures:
1. Tokens are chosen once per step, over the whole step and by the log-probs of the policy that sampled, not
   in each micro-batch, so that the choice does not depend on how a batch is split.
2. clip_cov: each eligible token is chosen independently, with a probability that yields `share` on average.
3. kl_cov: the threshold is found by counting, with a precision of 1/32768 of the range of cov.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlcore.algorithms.kl import kl_estimate
from rlcore.data.batch import Batch
from rlcore.data.loader import mix
from rlcore.errors import require
from rlcore.protocols.roles import Roles
from rlcore_algorithms.choose import choose_at_random, choose_largest
from rlcore_algorithms.family import Family, FamilyConfig, bounded_ratio, refuse_clip


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipCovConfig(FamilyConfig):
    """Settings of clip-cov."""

    share: float = 2e-4
    """Fraction of all tokens without a gradient."""
    cov_low: float = 1.0
    cov_high: float = 5.0

    def __post_init__(self) -> None:
        FamilyConfig.__post_init__(self)
        require(0 < self.share < 1, "share", "a number between 0 and 1", self.share, 2e-4)
        require(self.cov_low < self.cov_high, "cov_high", f"more than cov_low={self.cov_low}", self.cov_high, 5.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class KLCovConfig(FamilyConfig):
    """Settings of KL-cov; the clip settings are refused."""

    minibatches: int = 2
    share: float = 2e-3
    """Fraction of all tokens with a penalty."""
    penalty: float = 1.0

    def __post_init__(self) -> None:
        FamilyConfig.__post_init__(self)
        require(0 < self.share < 1, "share", "a number between 0 and 1", self.share, 2e-3)
        several = self.epochs * self.minibatches > 1
        expected = "2 or more, because in a single update the penalty has no gradient"
        require(several, "minibatches", expected, self.minibatches, 2)
        refuse_clip(self, "kl_cov", "clip_low", "clip_high")


class _Covariance(Family):
    """Base of both algorithms, with the token column `chosen`."""

    def reads(self) -> Mapping[str, Sequence[str]]:
        return {"actor": [*super().reads()["actor"], "chosen"]}

    def writes(self) -> Sequence[str]:
        return list(dict.fromkeys([*super().writes(), "old_log_probs", "chosen"]))


class ClipCov(_Covariance):
    """PPO's loss, without a gradient for some tokens of large covariance."""

    Config = ClipCovConfig

    def with_advantages(self, roles: Roles, samples: Batch, reward: Tensor) -> Batch:
        config, samples = self.config, super().with_advantages(roles, samples, reward)
        bounds = config.cov_low, config.cov_high
        return choose_at_random(roles, samples, self.advantage_column, config.share, bounds, self._seed())

    def _seed(self) -> int:
        return mix(self.config.shuffle_seed, self.num_updates)

    def policy_loss(self, log_probs: Tensor, old_log_probs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        terms, metrics = super().policy_loss(log_probs, old_log_probs, batch)
        chosen = batch["chosen"]
        return torch.where(chosen, terms.detach(), terms), metrics | {"chosen": chosen.to(terms.dtype)}


class KLCov(_Covariance):
    """Unclipped ratio, with a penalty on the tokens of the largest covariance."""

    Config = KLCovConfig

    def with_advantages(self, roles: Roles, samples: Batch, reward: Tensor) -> Batch:
        samples = super().with_advantages(roles, samples, reward)
        return choose_largest(roles, samples, self.advantage_column, self.config.share)

    def policy_loss(self, log_probs: Tensor, old_log_probs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        chosen, distance = batch["chosen"], (log_probs - old_log_probs).clamp(-20.0, 20.0).abs()
        terms = -bounded_ratio(log_probs, old_log_probs) * self.advantages(batch)
        terms = terms + self.config.penalty * torch.where(chosen, distance, 0.0)
        metrics = {"chosen": chosen.to(terms.dtype)}
        return terms, metrics | {"kl_to_old": kl_estimate(old_log_probs, log_probs.detach(), "k3")}
