"""Online DPO, arXiv 2402.04792: preference optimization on the policy's own responses.

    best, worst = the responses to a prompt with the highest and the lowest reward
    m = beta · [(log p - log p_ref)(best) - (log p - log p_ref)(worst)],   loss = mean over pairs of -log sigmoid(m)

Departures from the paper:
1. The reward of the run decides which response is better; the paper asks a language model.
2. A prompt whose responses all have the same reward yields no pair and is skipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from rlcore import Batch, LossTerms, TokenOutputs
from rlcore.algorithms.base import Epochs, EpochsConfig
from rlcore.errors import require
from rlcore.protocols import RoleSpec, Unit
from rlcore.protocols.roles import Roles


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleDPOConfig(EpochsConfig):
    """Settings, typed as algorithm.beta=0.5."""

    beta: float = 0.1
    """Strength of the pull toward the reference."""

    def __post_init__(self) -> None:
        EpochsConfig.__post_init__(self)
        require(self.beta > 0, "beta", "more than 0", self.beta, 0.1)


class ExampleDPO(Epochs):
    """Direct preference optimization on the best and the worst response; the base class provides `update`."""

    Config = ExampleDPOConfig
    compares_samples = True
    unit = Unit(column="group_id", size=2)  # the loss compares the two rows of a prompt
    corrects = True  # a pair may come from any policy

    def roles(self) -> Sequence[RoleSpec]:
        workers = {"actor": "policy", "reference": "reference", "rollout": "rollout"}
        return [RoleSpec(name=name, worker=worker) for name, worker in workers.items()]

    def writes(self) -> Sequence[str]:
        return []

    def reads(self) -> Mapping[str, Sequence[str]]:
        return {"actor": ["ref_log_probs"]}

    def collect(self, roles: Roles, prompts: Batch) -> Batch:
        """Generate, score, form pairs, and compute log-probs of the reference for the pairs only."""
        samples = roles.score(roles.generate(prompts))
        pairs = samples.take(best_and_worst(*samples.fetch("reward", "group_id")))
        return pairs | roles.reference.log_probs(pairs)

    def loss(self, out: TokenOutputs, batch: Batch) -> LossTerms:
        """Return one term per pair; the best response is in row 2k, the worst in row 2k + 1."""
        assert out.log_probs is not None, "the actor's outputs have log-probs"
        gap = batch.per_row(torch.where(batch["loss_mask"], out.log_probs - batch["ref_log_probs"], 0.0))
        margin = self.config.beta * (gap[0::2] - gap[1::2])
        metrics = {"margin": margin.detach(), "accuracy": (margin > 0).float()}
        return LossTerms(terms=-F.logsigmoid(margin), average="unit-mean", metrics=metrics)


def best_and_worst(reward: torch.Tensor, group_id: torch.Tensor) -> torch.Tensor:
    """Return rows best, worst, best, worst, … of groups with variance."""
    rows = []
    for group in sorted(set(group_id.tolist())):
        members = (group_id == group).nonzero().squeeze(1)
        best, worst = members[reward[members].argmax()], members[reward[members].argmin()]
        rows += [int(best), int(worst)] if reward[best] > reward[worst] else []
    return torch.tensor(rows, dtype=torch.int64)
