"""ORPO: odds-ratio preference optimization, without a reference, arXiv 2403.07691, eq. 6 and 7.

    loss = -log p(chosen) - beta · log sigmoid(log [odds(chosen) / odds(rejected)])
    log p(y) = mean over tokens of log p(token),   odds(y) = p(y) / (1 - p(y))

The data has the columns `chosen` and `rejected`, as for DPO.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F

from rlcore.data.batch import Batch
from rlcore.protocols.algorithm import RoleSpec
from rlcore.protocols.roles import Roles
from rlcore.types import LossTerms, TokenOutputs
from rlcore_algorithms.dpo import DPO

_BELOW_ZERO = -1e-6
"""A probability of 1 has infinite odds."""


class ORPO(DPO):
    """Fine-tuning on the chosen responses, with a penalty on the odds of the rejected ones; `beta` is its weight."""

    def roles(self) -> Sequence[RoleSpec]:
        return [RoleSpec(name="actor", worker="policy")]

    def reads(self) -> Mapping[str, Sequence[str]]:
        return {"actor": []}

    def collect(self, roles: Roles, prompts: Batch) -> Batch:
        """Load the pairs."""
        return roles.demonstrations(prompts, self.demonstrations)

    def loss(self, out: TokenOutputs, batch: Batch) -> LossTerms:
        assert out.log_probs is not None, "the actor's outputs have log-probs"
        mask = batch["loss_mask"]
        tokens = batch.per_row(mask.to(out.log_probs.dtype)).clamp(min=1)
        mean = batch.per_row(torch.where(mask, out.log_probs, 0.0)) / tokens
        log_odds = mean - torch.log(-torch.expm1(mean.clamp(max=_BELOW_ZERO)))
        margin, chosen = log_odds[0::2] - log_odds[1::2], mean[0::2]
        metrics = {"margin": margin.detach(), "accuracy": (margin > 0).to(mean.dtype), "chosen": chosen.detach()}
        terms = -chosen - self.config.beta * F.logsigmoid(margin)
        return LossTerms(terms=terms, average="unit-mean", metrics=metrics)
