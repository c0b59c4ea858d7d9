"""GRPO with another loss: a smooth bound instead of the clip. KL, entropy and averaging are inherited."""

from __future__ import annotations

import torch
from torch import Tensor

from rlcore import Batch
from rlcore.algorithms.grpo import GRPO


class SmoothGRPO(GRPO):
    def policy_loss(self, log_probs: Tensor, old_log_probs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        push = torch.tanh(log_probs - old_log_probs)  # saturates far from the old policy
        return -push * self.advantages(batch), {"push": push}
