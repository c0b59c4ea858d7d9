"""PPO: proximal policy optimization with a critic, arXiv 1707.06347, as used for language models (arXiv 2203.02155).

    r_t = -beta · KL_t  (+ the score at the last token);  A = GAE(gamma, lam), arXiv 1506.02438
    actor:  mean over tokens of -min(ratio · A, clip(ratio) · A) - c · entropy
    critic: mean over tokens of 0.5 · max((V - R)², (clip(V, V_old ± clip_value) - R)²)

Departures from the paper:
1. Actor and critic are two models with two optimizers.
2. Advantages are whitened over the whole step, not per mini-batch, so the gradient does not depend on how a
   step is split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlcore.algorithms.advantages import gae
from rlcore.algorithms.base import PolicyGradient, PolicyGradientConfig
from rlcore.algorithms.kl import kl_estimate
from rlcore.algorithms.losses import clipped_value_loss
from rlcore.data.batch import Batch
from rlcore.errors import require
from rlcore.protocols.algorithm import RoleSpec
from rlcore.protocols.roles import Roles
from rlcore.types import LossTerms, TokenOutputs


@dataclass(frozen=True, slots=True, kw_only=True)
class PPOConfig(PolicyGradientConfig):
    """Settings of PPO."""

    gamma: float = 1.0
    """Discount per token."""
    lam: float = 0.95
    """Lambda of generalized advantage estimation."""
    clip_value: float = 0.2
    """Clip range around the old value; 0: the value loss is not clipped."""
    whiten: bool = True
    """Normalize advantages over all loss tokens of the step."""

    def __post_init__(self) -> None:
        PolicyGradientConfig.__post_init__(self)  # super() fails here, because slots=True replaces the class
        require(0 <= self.gamma <= 1, "gamma", "a number from 0 to 1", self.gamma, 1.0)
        require(0 <= self.lam <= 1, "lam", "a number from 0 to 1", self.lam, 0.95)
        require(self.clip_value >= 0, "clip_value", "0 or more", self.clip_value, 0.2)


class PPO(PolicyGradient):
    """Clipped policy gradient with advantages from a critic."""

    Config = PPOConfig
    advantage_column = "advantages"

    def roles(self) -> Sequence[RoleSpec]:
        return [
            *super().roles(),
            RoleSpec(name="critic", worker="critic", model="critic.path", optimizer="critic.optimizer"),
        ]

    def reads(self) -> Mapping[str, Sequence[str]]:
        actor = [*super().reads()["actor"], "advantage_mean", "advantage_std"]
        return {"actor": actor, "critic": ["values", "returns"]}

    def writes(self) -> Sequence[str]:
        own = ["old_log_probs", "advantages", "returns", "rewards", "advantage_mean", "advantage_std"]
        return list(dict.fromkeys([*own, *super().writes()]))

    def collect(self, roles: Roles, prompts: Batch) -> Batch:
        """Generate, score, compute log-probs and values, and estimate advantages next to the data."""
        samples = roles.score(roles.generate(prompts)).balance(roles.actor.dp_size)
        samples |= roles.actor.log_probs(samples).rename(log_probs="old_log_probs").drop("entropy")
        if self.needs_reference:
            samples |= roles.reference.log_probs(samples)
        samples |= roles.critic.values(samples)
        columns = [
            "loss_mask",
            "old_log_probs",
            "values",
            "reward",
            *(["ref_log_probs"] if self.needs_reference else []),
        ]
        estimated = roles.critic.apply(
            estimate_advantages,
            samples.select(*columns),
            gamma=self.config.gamma,
            lam=self.config.lam,
            kl_coefficient=self.kl.coefficient if self.kl_in_reward else 0.0,
            kl_estimator=self.config.kl.estimator,
        )
        if self.kl_in_reward:
            self.observe_kl(roles, estimated.fetch("kl"))
        samples |= estimated.select("rewards", "advantages", "returns")
        samples = samples.with_rows(**self._whitening(estimated, samples))
        return self.with_entropy_coefficient(roles, samples)

    def advantages(self, batch: Batch) -> Tensor:
        mean, std = batch.per_token("advantage_mean"), batch.per_token("advantage_std")
        return (batch["advantages"] - mean) / std  # type: ignore[no-any-return]

    def value_loss(self, out: TokenOutputs, batch: Batch) -> LossTerms:
        """Return the critic's loss terms."""
        assert out.values is not None, "the critic's outputs have values"
        returns = batch["returns"]
        terms, clipped = clipped_value_loss(out.values, batch["values"], returns, clip=self.config.clip_value)
        error = (out.values.detach() - returns) ** 2
        return LossTerms(terms=terms, metrics={"clip_fraction": clipped, "value": out.values, "squared_error": error})

    def _whitening(self, estimated: Batch, samples: Batch) -> dict[str, Tensor]:
        """Return mean and standard deviation over all loss tokens of the step, computed from row sums."""
        total, squares = estimated.fetch("advantage_sum", "advantage_squares")
        ones = torch.ones(len(samples))
        if not self.config.whiten:
            return {"advantage_mean": 0 * ones, "advantage_std": ones}
        count = max(1, int(samples.fetch("num_loss_tokens").sum()))
        mean = float(total.sum()) / count
        variance = max(0.0, float(squares.sum()) / count - mean**2)
        return {"advantage_mean": mean * ones, "advantage_std": (variance**0.5 + 1e-8) * ones}


def estimate_advantages(batch: Batch, *, gamma: float, lam: float, kl_coefficient: float, kl_estimator: str) -> Batch:
    """Compute token rewards and GAE for one data-parallel share of the samples; runs next to the data.

    Returns the token columns `rewards`, `advantages`, `returns`, and the row columns `kl`, `advantage_sum`,
    `advantage_squares`.
    """
    mask = batch["loss_mask"]
    kl = torch.zeros(batch.num_tokens)
    if "ref_log_probs" in batch:
        kl = torch.where(mask, kl_estimate(batch["old_log_probs"], batch["ref_log_probs"], kl_estimator), 0.0)  # type: ignore[arg-type]
    rewards = -kl_coefficient * kl
    last = last_loss_tokens(mask, batch.lengths)
    rewards[last] += batch["reward"][batch.per_row(mask.float()) > 0]
    advantages, returns = gae(rewards, batch["values"], mask, batch.lengths, gamma=gamma, lam=lam)
    return Batch.of(
        lengths=batch.lengths,
        tokens={"rewards": rewards, "advantages": advantages, "returns": returns},
        rows={
            "kl": batch.per_row(kl),
            "advantage_sum": batch.per_row(advantages.double()),
            "advantage_squares": batch.per_row(advantages.double() ** 2),
        },
    )


def last_loss_tokens(loss_mask: Tensor, lengths: Tensor) -> Tensor:
    """Return the position of the last loss token of each row that has one."""
    row = torch.arange(len(lengths)).repeat_interleave(lengths)[loss_mask]
    where = loss_mask.nonzero().squeeze(1)
    ends = torch.ones(len(row), dtype=torch.bool)
    ends[:-1] = row[1:] != row[:-1]
    return where[ends]
