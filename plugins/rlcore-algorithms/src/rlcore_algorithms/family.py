"""Base of this package's policy gradients: one estimator × one loss × the core's off-policy correction.

The name of an algorithm selects its loss and its defaults; `estimator` may be any of the others:

    algorithm=gspo algorithm.estimator=rloo algorithm.correction.weight=token

Combinations that make no sense are refused when the config is read, with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from rlcore.algorithms.base import PolicyGradientConfig
from rlcore.algorithms.grpo import GRPO
from rlcore.data.batch import Batch
from rlcore.errors import ConfigError, require
from rlcore.protocols.roles import Roles
from rlcore.types import Mean
from rlcore_algorithms.estimators import ROW_ESTIMATORS
from rlcore_algorithms.greedy import greedy_baseline
from rlcore_algorithms.sampling import OverlongConfig, RefillConfig, overlong_penalty, refill
from rlcore_algorithms.token_baseline import baseline_advantages
from rlcore_algorithms.whitened import whitened_returns

Estimator = Literal[
    "grpo",
    "dr_grpo",
    "rloo",
    "opo",
    "gpg",
    "remax",
    "reinforce",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "optimal_token_baseline",
]


_OF_SINGLE_SAMPLES = ("reinforce", "remax", "reinforce_plus_plus")
"""Estimators whose baseline does not come from the group."""
PER_TOKEN = ("reinforce_plus_plus", "optimal_token_baseline")
"""Estimators that give each token its own advantage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyConfig(PolicyGradientConfig):
    """Settings shared by this package's policy gradients."""

    estimator: Estimator = "grpo"
    """Estimator of the advantages."""
    gamma: float = 1.0
    """Discount per token; used by reinforce_plus_plus only."""
    skip_zero_variance_groups: bool = False
    """Skip prompts whose responses all have the same reward in the update."""
    refill: RefillConfig = field(default_factory=RefillConfig)
    overlong: OverlongConfig = field(default_factory=OverlongConfig)

    def __post_init__(self) -> None:
        PolicyGradientConfig.__post_init__(self)
        require(0 < self.gamma <= 1, "gamma", "more than 0 and at most 1", self.gamma, 1.0)
        discounts = self.estimator == "reinforce_plus_plus"
        reason = f"1 with estimator={self.estimator}, which has one return for a whole response"
        require(discounts or self.gamma == 1, "gamma", reason, self.gamma, 1.0)
        varied = self.estimator not in _OF_SINGLE_SAMPLES
        reason = f"because with estimator={self.estimator} groups of equal rewards have a gradient"
        skip = self.skip_zero_variance_groups
        require(varied or not skip, "skip_zero_variance_groups", f"false, {reason}", skip, "false")
        require(varied or not self.refill.rounds, "refill.rounds", f"0, {reason}", self.refill.rounds, 0)
        reason = "false with estimator=gpg, whose alpha already compensates for groups without variance"
        require(self.estimator != "gpg" or not skip, "skip_zero_variance_groups", reason, skip, "false")


class Family(GRPO):
    """GRPO with a choice of estimator, loss and sampling. Subclasses override `policy_loss`."""

    Config = FamilyConfig

    @property
    def per_token(self) -> bool:
        """True if each token of a response has its own advantage."""
        return bool(self.config.estimator in PER_TOKEN)

    @property
    def compares_samples(self) -> bool:  # type: ignore[override]
        """True if a single sample of a prompt has no advantage."""
        return self.config.estimator not in _OF_SINGLE_SAMPLES

    @property
    def advantage_column(self) -> str:  # type: ignore[override]
        return "advantages" if self.per_token else "advantage"

    def writes(self) -> Sequence[str]:
        needed = {"remax": ["baseline"], "optimal_token_baseline": ["old_log_probs"]}
        return list(dict.fromkeys([*super().writes(), *needed.get(self.config.estimator, [])]))

    def draw(self, roles: Roles, prompts: Batch) -> Batch:
        """Generate and score samples; with `refill`, replace groups without variance by other prompts."""
        config = self.config
        relative = [spec.name for spec in roles.rewards if spec.relative != "no"]
        if relative and config.estimator == "remax":
            raise ConfigError(
                f"reward '{relative[0]}' is relative to its group, but estimator=remax compares with a greedy response"
                " outside the group\nRemove  relative  from this reward, or type  algorithm.estimator=rloo"
            )
        samples = refill(roles, prompts, self._draw, config.refill) if config.refill.rounds else None
        samples = self._draw(roles, prompts) if samples is None else samples
        if config.overlong.tokens:
            limit, length = roles.sampling.max_response_tokens, samples.fetch("num_loss_tokens")
            penalty = overlong_penalty(length, limit, config.overlong)
            roles.note("experience/overlong_penalty", Mean(float(penalty.sum()), float(len(penalty))))
            samples = samples.with_rows(reward=samples.fetch("reward") + penalty)
        return samples

    def _draw(self, roles: Roles, prompts: Batch) -> Batch:
        samples = roles.score(roles.generate(prompts))
        if self.config.estimator == "remax":
            baseline = greedy_baseline(roles, prompts, samples, self.config.overlong)
            samples = samples.with_rows(baseline=baseline)
        return samples

    def with_advantages(self, roles: Roles, samples: Batch, reward: Tensor) -> Batch:
        if self.config.estimator == "optimal_token_baseline":
            return baseline_advantages(roles, samples, reward)
        if self.per_token:
            coefficient = self.kl.coefficient if self.kl_in_reward else 0.0
            kl = self.config.kl
            return whitened_returns(roles, samples, gamma=self.config.gamma, kl=coefficient, estimator=kl.estimator)
        if self.config.estimator == "remax":
            return samples.with_rows(advantage=(reward - samples.fetch("baseline")).float())
        group_id, length = samples.fetch("group_id", "num_loss_tokens")
        estimate = ROW_ESTIMATORS[self.config.estimator]
        return samples.with_rows(advantage=estimate(reward, group_id, length).float())


def bounded_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """Return exp(log p - log p_old), [T], clamped so that it stays finite."""
    return torch.exp((log_probs - old_log_probs).clamp(-20.0, 20.0))


def refuse_token_advantages(config: FamilyConfig, name: str) -> None:
    """Refuse advantages per token; called by losses with one ratio per response."""
    whole = config.estimator not in PER_TOKEN
    expected = f"an estimator with one advantage per response, because {name} has one ratio per response"
    require(whole, "estimator", expected, config.estimator, "grpo")


def refuse_clip(config: FamilyConfig, name: str, *more: str) -> None:
    """Refuse `dual_clip`, and the settings in `more`; called by losses that would ignore them."""
    for setting in ("dual_clip", *more):
        value, default = getattr(config, setting), type(config).__dataclass_fields__[setting].default
        require(value == default, setting, f"{default}, because {name} has no such bound", value, default)
