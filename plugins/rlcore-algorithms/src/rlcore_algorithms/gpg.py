"""GPG: group policy gradient, arXiv 2504.02546.

    A_i = alpha · (r_i - mean of its group),   alpha = responses / responses in groups with variance
    loss = -mean over tokens of  A_i · log p(token)

No ratio, no clip, no reference. Departures:
1. alpha is computed over the step, not the mini-batch; other implementations count nonzero rewards instead.
2. F_norm is 1.
A gradient without a ratio is correct only for the policy that sampled, so epochs > 1 is refused; with several
mini-batches, later ones are off-policy by the preceding optimizer steps.
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
    """Settings of GPG; the clip settings are refused."""

    estimator: Estimator = "gpg"

    def __post_init__(self) -> None:
        FamilyConfig.__post_init__(self)
        expected = "1, because this loss has no ratio to the policy that sampled"
        require(self.epochs == 1, "epochs", expected, self.epochs, 1)
        refuse_clip(self, "gpg", "clip_low", "clip_high")


class GPG(Family):
    """Policy gradient without ratio or clip."""

    Config = GPGConfig

    def policy_loss(self, log_probs: Tensor, old_log_probs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        kl = kl_estimate(old_log_probs, log_probs.detach(), "k3")
        return -self.advantages(batch) * log_probs, {"kl_to_old": kl}
