"""The core's PPO with an off-policy correction, and with dual clip (arXiv 1912.09729) enabled by default.

    A < 0:  term = min(max(-ratio · A, -clip(ratio) · A), -dual_clip · A)

The critic is trained as in the core; the correction weights apply only to the actor's terms.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from rlcore.algorithms.ppo import PPO, PPOConfig
from rlcore.data.batch import Batch
from rlcore_algorithms.correction import CorrectionConfig, correct


@dataclass(frozen=True, slots=True, kw_only=True)
class DualClipPPOConfig(PPOConfig):
    """Settings of PPO with dual clip."""

    dual_clip: float = 3.0
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)


class DualClipPPO(PPO):
    """PPO whose loss is also bounded for negative advantages."""

    Config = DualClipPPOConfig

    def policy_loss(self, log_probs: Tensor, old_log_probs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        terms, metrics = super().policy_loss(log_probs, old_log_probs, batch)
        terms, more = correct(terms, old_log_probs, batch, self.config.correction)
        return terms, metrics | more
