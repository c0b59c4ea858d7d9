"""Online DPO, arXiv 2402.04792: preference optimisation on the policy's own responses.

    best, worst = the responses to a prompt with the highest and the lowest reward
    m = beta · [(log p - log p_ref)(best) - (log p - log p_ref)(worst)],   loss = mean over pairs of -log sigmoid(m)

Departures from the paper:
1. The reward of the run decides which response is better; the paper asks a language model.
2. A prompt whose responses all have the same reward yields no pair and is skipped.
3. Each row stores its partner's half of m from when the samples were collected. For the first mini-batch of a
   step, the gradient is half that of the paper, because the mean is over the two rows of a pair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from rlcore import Batch, LossTerms, TokenOutputs
from rlcore.algorithms.base import Epochs, EpochsConfig
from rlcore.errors import require
from rlcore.protocols import RoleSpec
from rlcore.protocols.roles import Roles


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleDPOConfig(EpochsConfig):
    """Settings, typed as algorithm.beta=0.5."""

    beta: float = 0.1
    """Strength of the pull towards the reference."""

    def __post_init__(self) -> None:
        EpochsConfig.__post_init__(self)
        require(self.beta > 0, "beta", "more than 0", self.beta, 0.1)


class ExampleDPO(Epochs):
    """Direct preference optimisation on the best and the worst response; the base class provides `update`."""

    Config = ExampleDPOConfig
    compares_samples = True

    def roles(self) -> Sequence[RoleSpec]:
        workers = {"actor": "policy", "reference": "reference", "rollout": "rollout"}
        return [RoleSpec(name=name, worker=worker) for name, worker in workers.items()]

    def writes(self) -> Sequence[str]:
        return ["partner", "sign"]

    def reads(self) -> Mapping[str, Sequence[str]]:
        return {"actor": ["ref_log_probs", "partner", "sign"]}

    def collect(self, roles: Roles, prompts: Batch) -> Batch:
        """Generate, score, form pairs, and compute log-probs of both models for the pairs only."""
        samples = roles.score(roles.generate(prompts))
        rows, partner = best_and_worst(*samples.fetch("reward", "group_id"))
        pairs = samples.take(rows)
        pairs |= roles.reference.log_probs(pairs)
        seen = pairs.select("loss_mask", "ref_log_probs") | roles.actor.log_probs(pairs).drop("entropy")
        gap = roles.actor.apply(reference_gap, seen).fetch("gap")
        sign = torch.ones(len(rows))
        sign[1::2] = -1.0
        return pairs.with_rows(partner=gap[partner], sign=sign).balance(roles.actor.dp_size)

    def loss(self, out: TokenOutputs, batch: Batch) -> LossTerms:
        """Return the loss terms, [B]; the gradient flows through the row's own half of the margin only."""
        assert out.log_probs is not None, "the actor's outputs have log-probs"
        gap = batch.per_row(torch.where(batch["loss_mask"], out.log_probs - batch["ref_log_probs"], 0.0))
        margin = self.config.beta * batch["sign"] * (gap - batch["partner"])
        metrics = {"margin": margin.detach(), "accuracy": (margin > 0).float()}
        return LossTerms(terms=-F.logsigmoid(margin), average="row-mean", metrics=metrics)


def best_and_worst(reward: torch.Tensor, group_id: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows best, worst, best, worst, … of groups with variance, and the index of each row's partner."""
    rows = []
    for group in sorted(set(group_id.tolist())):
        members = (group_id == group).nonzero().squeeze(1)
        best, worst = members[reward[members].argmax()], members[reward[members].argmin()]
        rows += [int(best), int(worst)] if reward[best] > reward[worst] else []
    return torch.tensor(rows, dtype=torch.int64), torch.arange(len(rows)) ^ 1


def reference_gap(batch: Batch) -> Batch:
    """Compute the row column `gap`, log p - log p_ref of each response; runs next to the data."""
    gap = torch.where(batch["loss_mask"], batch["log_probs"] - batch["ref_log_probs"], 0.0)
    return Batch.of(lengths=batch.lengths, rows={"gap": batch.per_row(gap)})
