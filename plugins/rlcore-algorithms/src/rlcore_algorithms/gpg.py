"""GPG: group policy gradient, arXiv 2504.02546.

    A_i = alpha · (r_i - mean of its group),   alpha = responses / responses of groups whose rewards differ
    loss = -mean over tokens of  A_i · log p(token)

No ratio, no clip, no reference. Departures:
1. alpha is that of the step, not of the mini-batch; other implementations count rewards that are not 0 instead.
2. F_norm is 1.
A gradient without a ratio is right only for the policy that drew the samples, so epochs > 1 are refused; several
mini-batches drift by as many optimiser steps.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlcore.algorithms.kl import kl_estimate
from rlcore.data.batch import Batch
from rlcore.errors import require
from rlcore_algorithms.family import Estimator, Family, FamilyConfig, refuse_clip


@dataclass(frozen=True, slots=True, kw_only=True)
class GPGConfig(FamilyConfig):
    """Settings of GPG; those of the clip have no meaning."""

    estimator: Estimator = "gpg"

    def __post_init__(self) -> None:
        FamilyConfig.__post_init__(self)
        require(self.epochs == 1, "epochs", "1: this loss has no ratio to the policy that sampled", self.epochs, 1)
        refuse_clip(self, "gpg", "clip_low", "clip_high")


class GPG(Family):
    """The plain policy gradient."""

    Config = GPGConfig

    def terms(self, log_probs: Tensor, old_log_probs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        kl = kl_estimate(old_log_probs, log_probs.detach(), "k3")
        return -self.advantages(batch) * log_probs, {"kl_to_old": kl}
