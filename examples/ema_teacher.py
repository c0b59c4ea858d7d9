"""GRPO that stays close to a moving average of its own policy.

    rlcore train preset=quickstart algorithm=examples/ema_teacher.py:EMATeacher runtime=local trainer.steps=20

The reference of the KL penalty is not the initial model, but an exponential moving average of the policy, as in the
anchor of WARP (arXiv 2406.16768, section 3.1). After every step its weights become (1 - rate) · old + rate · policy.

The role `reference` declares that it receives weights, so `roles.send` may update it, and checkpoints contain it:
`rlcore export RUN DIR --role reference` writes the averaged model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rlcore import Batch
from rlcore.algorithms.grpo import GRPO, GRPOConfig
from rlcore.algorithms.kl import KLConfig
from rlcore.errors import require
from rlcore.protocols.algorithm import RoleSpec
from rlcore.protocols.roles import Roles
from rlcore.types import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class EMATeacherConfig(GRPOConfig):
    """Settings of GRPO, with a KL penalty by default, and the rate of the average."""

    kl: KLConfig = field(default_factory=lambda: KLConfig(coefficient=0.02))
    rate: float = 0.05
    """Share of the new policy in the average after each step."""

    def __post_init__(self) -> None:
        GRPOConfig.__post_init__(self)  # super() fails here, because slots=True replaces the class
        require(0 < self.rate <= 1, "rate", "more than 0, at most 1", self.rate, 0.05)


class EMATeacher(GRPO):
    """GRPO whose reference follows the policy."""

    Config = EMATeacherConfig

    def roles(self) -> Sequence[RoleSpec]:
        return [replace(it, weights_from="actor") if it.name == "reference" else it for it in super().roles()]

    def update(self, roles: Roles, experience: Batch) -> Metrics:
        """Update the policy, then move the reference toward it."""
        metrics = super().update(roles, experience)
        if self.needs_reference:
            roles.send("actor", "reference", mix=self.config.rate)
        return metrics
