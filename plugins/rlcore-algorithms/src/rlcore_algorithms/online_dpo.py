"""Online DPO: direct preference optimization on the policy's own responses, arXiv 2402.04792.

    chosen, rejected = the best and the worst of n responses to a prompt, by their reward
    loss = -log sigmoid(beta · [(log p - log p_ref)(chosen) - (log p - log p_ref)(rejected)])

with log p of a whole response (arXiv 2305.18290, eq. 7) and p_ref the initial policy. Departures:
1. The reward of the run decides which response is better; the paper asks a language model.
2. A prompt whose responses all have the same reward yields no pair and is skipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlcore.algorithms.base import EpochsConfig
from rlcore.data.batch import Batch
from rlcore.errors import require
from rlcore.protocols.algorithm import RoleSpec
from rlcore.protocols.roles import Roles
from rlcore.types import LossTerms, Mean, TokenOutputs
from rlcore_algorithms.pairs import Pairwise, logistic


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineDPOConfig(EpochsConfig):
    """Settings of Online DPO."""

    beta: float = 0.1
    """Strength of the pull toward the reference."""

    def __post_init__(self) -> None:
        EpochsConfig.__post_init__(self)
        require(self.beta > 0, "beta", "more than 0", self.beta, 0.1)


class OnlineDPO(Pairwise):
    """Direct preference optimization on the best and the worst response to each prompt."""

    Config = OnlineDPOConfig
    compares_samples = True

    def reads(self) -> Mapping[str, Sequence[str]]:
        return {"actor": ["ref_log_probs"]}

    def roles(self) -> Sequence[RoleSpec]:
        names = {"actor": "policy", "reference": "reference", "rollout": "rollout"}
        return [RoleSpec(name=name, worker=worker) for name, worker in names.items()]

    def collect(self, roles: Roles, prompts: Batch) -> Batch:
        """Generate, score, form pairs, and compute the log-probs of the reference."""
        samples = roles.score(roles.generate(prompts))
        reward, group_id = samples.fetch("reward", "group_id")
        rows = best_and_worst(reward, group_id)
        roles.note("experience/pairs", Mean(float(len(rows) // 2)))
        pairs = samples.take(rows)
        return pairs | roles.reference.log_probs(pairs)

    def loss(self, out: TokenOutputs, batch: Batch) -> LossTerms:
        assert out.log_probs is not None, "the actor's outputs have log-probs"
        gap = torch.where(batch["loss_mask"], out.log_probs - batch["ref_log_probs"], 0.0)
        return logistic(self.config.beta * batch.per_row(gap))


def best_and_worst(reward: Tensor, group_id: Tensor) -> Tensor:
    """Return the rows of the best and worst response of each group with variance, [2P]; the first of equals."""
    rows = []
    for group in torch.unique(group_id).tolist():
        members = (group_id == group).nonzero().squeeze(1)
        best, worst = members[reward[members].argmax()], members[reward[members].argmin()]
        if reward[best] > reward[worst]:
            rows += [int(best), int(worst)]
    return torch.tensor(rows, dtype=torch.int64)
