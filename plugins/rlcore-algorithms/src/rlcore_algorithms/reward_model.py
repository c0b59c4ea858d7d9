"""Reward models from preferences: Bradley and Terry 1952, as in arXiv 2203.02155, eq. 1.

    loss = -log sigmoid(s(chosen) - s(rejected)),   s = value head at the end of prompt and response

The data has the columns `chosen` and `rejected`. The model is `model.path` with a value head; its role is
`actor`, and nothing is generated. With `data.eval`, evaluation reports the share of held-out pairs in the
right order (`eval/pass_rate`) and their loss.

The value at token i is that of the state before it (types.py). A token is therefore appended to the response,
and the value there, which depends on the whole text before it, is the score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rlcore import dispatch
from rlcore.algorithms.base import EpochsConfig
from rlcore.data.batch import Batch
from rlcore.protocols.algorithm import EvalConfig, RoleSpec
from rlcore.protocols.roles import Roles
from rlcore.types import LossTerms, TokenOutputs
from rlcore.workers.critic import with_score_token
from rlcore.workers.model import TrainedWorker
from rlcore_algorithms.pairs import Pairwise, logistic


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelConfig(EpochsConfig):
    """Settings of reward-model training."""

    chosen: str = "chosen"
    """Column of the preferred responses."""
    rejected: str = "rejected"
    """Column of the other responses."""


class TrainedRewardModelWorker(TrainedWorker):
    """A model with a value head that scores whole responses."""

    head = "value"

    @dispatch("dp", reads=("input_ids", "loss_mask"))
    def scores(self, batch: Batch) -> Batch:
        """Compute the row column `score`, the value at the single loss token of each row."""
        values = self.forward(batch).values
        assert values is not None, "a value head has values"
        return Batch.of(lengths=batch.lengths, rows={"score": batch.per_row(values.to(batch.device))})


class RewardModel(Pairwise):
    """Trains a model to score chosen responses above rejected ones."""

    Config = RewardModelConfig
    without = ("rollout", "reward")

    @property
    def demonstrations(self) -> Sequence[str]:
        """Columns of the data that hold responses."""
        return (self.config.chosen, self.config.rejected)

    def roles(self) -> Sequence[RoleSpec]:
        return [RoleSpec(name="actor", worker="trained_reward_model")]

    def reads(self) -> Mapping[str, Sequence[str]]:
        return {"actor": []}

    def collect(self, roles: Roles, prompts: Batch) -> Batch:
        """Load the pairs and append the score token."""
        pairs = roles.demonstrations(prompts, self.demonstrations)
        ended = roles.actor.apply(with_score_token, pairs.select("input_ids", "loss_mask"))
        rows = {name: pairs.fetch(name) for name in ("sample_id", "group_id")}
        return ended.with_rows(**rows)

    def loss(self, out: TokenOutputs, batch: Batch) -> LossTerms:
        assert out.values is not None, "a value head has values"
        return logistic(batch.per_row(torch.where(batch["loss_mask"], out.values, 0.0)))

    def evaluate(self, roles: Roles, prompts: Batch, config: EvalConfig) -> tuple[dict[str, float], Batch]:
        """Compute the share of held-out pairs in the right order, and their loss."""
        pairs = self.collect(roles, prompts)
        score: Tensor = roles.group("actor", TrainedRewardModelWorker).scores(pairs).fetch("score")
        margin = score[0::2] - score[1::2]
        metrics = {
            "eval/pass_rate": float((margin > 0).double().mean()),
            "eval/loss": float(-F.logsigmoid(margin).mean()),
        }
        return metrics | {"eval/samples": float(len(pairs))}, pairs
