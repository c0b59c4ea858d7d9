"""GRPO with another loss: a smooth bound in place of the clip. Everything else is inherited."""

from __future__ import annotations

import torch

from rlcore import Batch, LossTerms, TokenOutputs
from rlcore.algorithms.grpo import GRPO


class SmoothGRPO(GRPO):
    def loss(self, out: TokenOutputs, batch: Batch) -> LossTerms:
        assert out.log_probs is not None, "the actor's outputs have log-probs"
        old = out.log_probs.detach() if self.on_policy else batch["old_log_probs"]
        push = torch.tanh(out.log_probs - old)  # the further from the old policy, the weaker
        return LossTerms(terms=-push * batch.per_token("advantage"), metrics={"push": push.detach()})
