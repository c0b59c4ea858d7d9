"""Learning from pairs: a logistic loss on the difference of two scores, computed row by row.

    loss = -log sigmoid(m),   m = x(chosen) - x(rejected)

The two rows of a pair may be in different micro-batches, so m is computed beforehand, by a forward pass with
the weights that are about to be updated. The loss then splits into one term per row, with the exact gradient:

    term_i = -log sigmoid(m) - 2 · sign_i · sigmoid(-m) · (x_i - stopgrad(x_i)),   averaged over all rows

The factor 2 is there because a mean over n pairs is a mean over 2n rows. Online DPO, offline DPO and reward
models differ only in x.
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
    """Base of algorithms that learn from pairs. Rows 2k and 2k + 1 are a pair, the chosen response first."""

    shows: Mapping[str, str] = {"actor/loss": "loss", "actor/accuracy": "accuracy"}

    def scores(self, roles: Roles, samples: Batch) -> Tensor:
        """Return x of each row under the current weights, [B]; only these numbers reach the controller."""
        raise NotImplementedError

    def with_margins(self, roles: Roles, pairs: Batch) -> Batch:
        """Add the row columns `margin` and `sign` to the pairs."""
        x = self.scores(roles, pairs).double()
        margin = (x[0::2] - x[1::2]).repeat_interleave(2).float()
        return pairs.with_rows(margin=margin, sign=torch.tensor([1.0, -1.0]).repeat(len(pairs) // 2))

    def reads(self) -> Mapping[str, Sequence[str]]:
        return {"actor": ["margin", "sign"]}

    def writes(self) -> Sequence[str]:
        return ["margin", "sign"]

    def logistic(self, x: Tensor, batch: Batch) -> LossTerms:
        """Return the logistic loss for x [B], with its gradient."""
        margin, sign = batch["margin"], batch["sign"]
        push = sign * torch.sigmoid(-margin) * (x - x.detach())
        right = (margin > 0).to(x.dtype)
        return LossTerms(
            terms=-F.logsigmoid(margin) - 2.0 * push, average="row-mean", metrics={"margin": margin, "accuracy": right}
        )

    def update(self, roles: Roles, experience: Batch) -> Metrics:
        """Update in epochs × mini-batches of whole pairs; recompute margins before all steps but the first."""
        metrics: list[Metrics] = []
        pair_id = experience.fetch("sample_id")[0::2]
        for number, chosen in enumerate(self.minibatches(pair_id.numpy())):
            mini = experience.take(np.stack([2 * chosen, 2 * chosen + 1], axis=1).reshape(-1))
            mini = self.with_margins(roles, mini) if number else mini
            counts = count(mini.fetch("num_loss_tokens"))
            updated = roles.actor.update(mini.balance(roles.actor.dp_size), counts)
            metrics.append({f"actor/{name}": mean for name, mean in updated.items()})
        return merge_metrics(metrics)


def implicit_rewards(batch: Batch, *, beta: float) -> Batch:
    """Compute the row column `implicit_reward`, beta · (log p - log p_ref); runs next to the data."""
    gap = torch.where(batch["loss_mask"], batch["log_probs"] - batch["ref_log_probs"], 0.0)
    return Batch.of(lengths=batch.lengths, rows={"implicit_reward": beta * batch.per_row(gap)})


def reference_gap(roles: Roles, samples: Batch, beta: float) -> Tensor:
    """Return the implicit rewards of samples that have `ref_log_probs`, [B]."""
    present = samples.select("loss_mask", "ref_log_probs") | roles.actor.log_probs(samples).drop("entropy")
    gap: Tensor = roles.actor.apply(implicit_rewards, present, beta=beta).fetch("implicit_reward")
    return gap
