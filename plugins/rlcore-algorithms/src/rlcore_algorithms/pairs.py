"""Learning from pairs: a logistic loss on the difference of two scores, one row of a batch at a time.

    loss = -log sigmoid(m),   m = x(chosen) - x(rejected)

The rows of a pair may lie in different micro-batches, so m is computed beforehand, by a forward pass of the weights
that are about to be updated. With it the loss is linear in what each row contributes, and its gradient is exact:

    term_i = -log sigmoid(m) - 2 · sign_i · sigmoid(-m) · (x_i - stopgrad(x_i)),   averaged over the rows of both

(2, as a mean over n pairs is one over 2n rows.) Online DPO, offline DPO and reward models differ in x only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rlcore.algorithms.base import Epochs
from rlcore.data.batch import Batch
from rlcore.protocols.roles import Roles
from rlcore.types import LossTerms, Metrics, merge_metrics
from rlcore.workers.averaging import count


class Pairwise(Epochs):
    """Base of algorithms that compare two responses. Rows 2k and 2k + 1 of the experience are a pair, chosen first."""

    shows: Mapping[str, str] = {"actor/loss": "loss", "actor/accuracy": "accuracy"}

    def scores(self, roles: Roles, samples: Batch) -> Tensor:
        """[B] x of each row under the present weights; only these numbers come to the controller."""
        raise NotImplementedError

    def with_margins(self, roles: Roles, pairs: Batch) -> Batch:
        """The pairs with the row columns `margin` and `sign`."""
        x = self.scores(roles, pairs).double()
        margin = (x[0::2] - x[1::2]).repeat_interleave(2).float()
        return pairs.with_rows(margin=margin, sign=torch.tensor([1.0, -1.0]).repeat(len(pairs) // 2))

    def reads(self) -> Mapping[str, Sequence[str]]:
        return {"actor": ["margin", "sign"]}

    def writes(self) -> Sequence[str]:
        return ["margin", "sign"]

    def logistic(self, x: Tensor, batch: Batch) -> LossTerms:
        """The loss for x [B], with its gradient."""
        margin, sign = batch["margin"], batch["sign"]
        push = sign * torch.sigmoid(-margin) * (x - x.detach())
        right = (margin > 0).to(x.dtype)
        return LossTerms(
            terms=-F.logsigmoid(margin) - 2.0 * push, average="row-mean", metrics={"margin": margin, "accuracy": right}
        )

    def update(self, roles: Roles, experience: Batch) -> Metrics:
        """Epochs × mini-batches of whole pairs; margins are computed anew before every step but the first."""
        metrics, self._metrics = [self._metrics], {}
        pair_id = experience.fetch("sample_id")[0::2]
        for number, chosen in enumerate(self.minibatches(pair_id.numpy())):
            mini = experience.take(np.stack([2 * chosen, 2 * chosen + 1], axis=1).reshape(-1))
            mini = self.with_margins(roles, mini) if number else mini
            counts = count(mini.fetch("num_loss_tokens"))
            updated = roles.actor.update(mini.balance(roles.actor.dp_size), counts)
            metrics.append({f"actor/{name}": mean for name, mean in updated.items()})
        return merge_metrics(metrics)


def implicit_rewards(batch: Batch, *, beta: float) -> Batch:
    """Row column `implicit_reward`: beta · (log p(response) - log p_ref(response)). Runs next to the data."""
    gap = torch.where(batch["loss_mask"], batch["log_probs"] - batch["ref_log_probs"], 0.0)
    return Batch.of(lengths=batch.lengths, rows={"implicit_reward": beta * batch.per_row(gap)})


def reference_gap(roles: Roles, samples: Batch, beta: float) -> Tensor:
    """[B] the implicit rewards of samples that have `ref_log_probs`."""
    present = samples.select("loss_mask", "ref_log_probs") | roles.actor.log_probs(samples).drop("entropy")
    gap: Tensor = roles.actor.apply(implicit_rewards, present, beta=beta).fetch("implicit_reward")
    return gap
