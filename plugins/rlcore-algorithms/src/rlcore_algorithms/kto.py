"""KTO: Kahneman-Tversky optimization on responses that are labeled good or bad, arXiv 2402.01306, eq. 7 and 8.

    r = log p(y | x) - log p_ref(y | x)
    z = max(0, mean over i of  log p(y' | x_i) - log p_ref(y' | x_i)),   y' = y_{i+1}, the response to another prompt
    loss = mean over responses of  desirable_weight · sigmoid(beta · (z - r))     if the label is true
                                   undesirable_weight · sigmoid(beta · (r - z))   if it is false

which is the paper's lambda - v. The reference point z has no gradient. The data has a response and a label for each
prompt, and no pairs. Departure: z is estimated over the whole step by the policy before its updates, so that it does
not depend on how a batch is split; with one update per step this is the policy of the paper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rlcore.algorithms.base import Epochs, EpochsConfig
from rlcore.data.batch import Batch
from rlcore.errors import ConfigError, require
from rlcore.protocols.algorithm import RoleSpec
from rlcore.protocols.roles import Roles
from rlcore.types import LossTerms, Mean, TokenOutputs
from rlcore.workers.policy import PolicyWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class KTOConfig(EpochsConfig):
    """Settings of KTO."""

    response: str = "response"
    """Column of the responses. Without it, the last message of each conversation is the response."""
    label: str = "label"
    """Column with true for desirable and false for undesirable responses."""
    beta: float = 0.1
    """Strength of the pull toward the reference."""
    desirable_weight: float = 1.0
    """Weight of desirable responses. The paper balances the weights so that each times the number of its responses is
    about the same."""
    undesirable_weight: float = 1.0

    def __post_init__(self) -> None:
        EpochsConfig.__post_init__(self)
        require(self.beta > 0, "beta", "more than 0", self.beta, 0.1)
        for name in ("desirable_weight", "undesirable_weight"):
            require(getattr(self, name) >= 0, name, "0 or more", getattr(self, name), 1.0)
        require(self.desirable_weight + self.undesirable_weight > 0, "desirable_weight", "more than 0", 0.0, 1.0)


class KTO(Epochs):
    """Desirable responses become more likely than under the reference, undesirable ones less likely."""

    Config = KTOConfig
    shows: Mapping[str, str] = {"actor/loss": "loss", "actor/accuracy": "accuracy"}
    without = ("rollout", "reward")
    corrects = True
    """A label says whether a response is good, whichever policy wrote it."""

    @property
    def demonstrations(self) -> Sequence[str]:
        """Columns of the data that hold responses."""
        return (self.config.response,)

    @property
    def labels(self) -> Sequence[str]:
        """Columns of the data that hold true or false."""
        return (self.config.label,)

    def roles(self) -> Sequence[RoleSpec]:
        return [RoleSpec(name="actor", worker="policy"), RoleSpec(name="reference", worker="reference")]

    def reads(self) -> Mapping[str, Sequence[str]]:
        return {"actor": ["ref_log_probs", *self.writes()]}

    def writes(self) -> Sequence[str]:
        return ["desirable", "reference_point"]

    def collect(self, roles: Roles, prompts: Batch) -> Batch:
        """Load the responses, compute the log-probs of the reference, and estimate the reference point."""
        point = self._reference_point(roles, prompts)
        desirable = torch.tensor([bool(label) for label in prompts.fetch(self.config.label)])
        roles.note("kto/reference_point", Mean(point))
        roles.note("kto/desirable", Mean(float(desirable.sum()), float(len(desirable))))
        samples = roles.demonstrations(prompts, self.demonstrations)
        samples |= roles.reference.log_probs(samples)
        return samples.with_rows(desirable=desirable, reference_point=torch.full((len(samples),), point))

    def _reference_point(self, roles: Roles, prompts: Batch) -> float:
        """Return z, from each response with the prompt of the row before."""
        if len(prompts) < 2:
            raise ConfigError(
                "algorithm 'kto' compares each response with the prompt of another one, but a step has only one\n"
                "Type  trainer.prompts_per_step=32"
            )
        before = np.roll(np.arange(len(prompts)), 1)
        mismatched = prompts.select("input_ids").take(before) | prompts.drop("input_ids")
        limit = roles.sampling.max_response_tokens
        pairs = roles.group("actor", PolicyWorker).demonstrations(mismatched, self.demonstrations, limit)
        pairs = pairs.balance(roles.actor.dp_size)
        pairs |= roles.actor.log_probs(pairs) | roles.reference.log_probs(pairs)
        columns = pairs.select("loss_mask", "log_probs", "ref_log_probs")
        return max(0.0, float(roles.actor.apply(log_ratio, columns).fetch("log_ratio").double().mean()))

    def loss(self, out: TokenOutputs, batch: Batch) -> LossTerms:
        assert out.log_probs is not None, "the actor's outputs have log-probs"
        config, desirable = self.config, batch["desirable"]
        gap = torch.where(batch["loss_mask"], out.log_probs - batch["ref_log_probs"], 0.0)
        beyond = config.beta * (batch.per_row(gap) - batch["reference_point"].to(gap.dtype))
        margin = torch.where(desirable, beyond, -beyond)
        weight = desirable * config.desirable_weight + ~desirable * config.undesirable_weight
        metrics = {"margin": margin.detach(), "accuracy": (margin > 0).to(gap.dtype)}
        return LossTerms(terms=weight * torch.sigmoid(-margin), average="row-mean", metrics=metrics)


def log_ratio(batch: Batch) -> Batch:
    """Compute the row column `log_ratio`, log p - log p_ref of each response; runs next to the data."""
    gap = torch.where(batch["loss_mask"], batch["log_probs"] - batch["ref_log_probs"], 0.0)
    return Batch.of(lengths=batch.lengths, rows={"log_ratio": batch.per_row(gap)})
