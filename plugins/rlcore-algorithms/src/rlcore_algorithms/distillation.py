"""On-policy distillation: a teacher scores the student's tokens (GKD, arXiv 2306.13649, lambda = 1).

    KL(student || teacher) per token, estimated at the tokens that the student sampled:
    A_t = log p_teacher(t) - log p_student(t),   loss = mean over tokens of PPO's clipped loss with these advantages

The advantage of a token counts that token alone (discount 0), as in MiniLLM's single-step part (arXiv
2306.08543). The teacher is a frozen model with the same tokenizer: `algorithm.teacher=DIR`. No reward is
required; a configured one is only logged. Departure from GKD: the divergence is estimated at the sampled
token, not summed over the vocabulary, so no logits leave the models. The teacher may also be a model on a
server of vLLM (served_teacher.py): `algorithm.server={url: http://localhost:8000/v1, model: NAME}`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rlcore.algorithms.base import PolicyGradient, PolicyGradientConfig
from rlcore.data.batch import Batch
from rlcore.errors import require
from rlcore.protocols.algorithm import RoleSpec
from rlcore.protocols.roles import Roles
from rlcore.types import Mean
from rlcore.workers.policy import ReferenceWorker
from rlcore_algorithms.served_teacher import ServedTeacherWorker, TeacherServerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationConfig(PolicyGradientConfig):
    """Settings of on-policy distillation."""

    teacher: str = ""
    """Directory of the teacher model; empty with `server`."""
    server: TeacherServerConfig = field(default_factory=TeacherServerConfig)

    def __post_init__(self) -> None:
        PolicyGradientConfig.__post_init__(self)
        given = bool(self.teacher) != bool(self.server.url)
        expected = (
            f"nothing with server.url={self.server.url}" if self.server.url else "a directory in Hugging Face layout"
        )
        require(given, "teacher", expected, self.teacher or "nothing", "''" if self.server.url else "DIR")
        expected = "loss, because distillation does not train on rewards"
        require(self.kl.where == "loss", "kl.where", expected, self.kl.where, "loss")


class Distillation(PolicyGradient):
    """Policy gradient whose advantage is the teacher's log-prob minus the student's."""

    Config = DistillationConfig
    advantage_column = "advantages"
    without = ("reward",)

    def roles(self) -> Sequence[RoleSpec]:
        here = RoleSpec(name="teacher", worker="reference", model="algorithm.teacher")
        served = RoleSpec(name="teacher", worker="served_teacher")
        return [*super().roles(), served if self.config.server.url else here]

    def writes(self) -> Sequence[str]:
        return list(dict.fromkeys(["old_log_probs", *super().writes()]))

    def collect(self, roles: Roles, prompts: Batch) -> Batch:
        """Generate, and compute the log-probs of student and teacher."""
        samples = roles.generate(prompts)
        if roles.has("reward"):
            samples = roles.score(samples)
        samples = samples.balance(roles.actor.dp_size)
        samples |= roles.actor.log_probs(samples).rename(log_probs="old_log_probs").drop("entropy")
        if self.needs_reference:
            samples |= roles.reference.log_probs(samples)
        kind: Any = ServedTeacherWorker if self.config.server.url else ReferenceWorker
        teacher = roles.group("teacher", kind).log_probs(samples).rename(ref_log_probs="teacher_log_probs")
        compared = roles.actor.apply(compare, samples.select("loss_mask", "old_log_probs") | teacher)
        kl, count = compared.fetch("kl_to_teacher"), samples.fetch("num_loss_tokens")
        roles.note("distillation/kl", Mean(float(kl.sum()), float(count.sum())))
        return self.with_entropy_coefficient(roles, samples | compared.select("advantages"))


def compare(batch: Batch) -> Batch:
    """Compute `advantages` [T] and `kl_to_teacher` [B], a sum over tokens; runs next to the data."""
    advantages = torch.where(batch["loss_mask"], batch["teacher_log_probs"] - batch["old_log_probs"], 0.0)
    rows = {"kl_to_teacher": -batch.per_row(advantages.double())}
    return Batch.of(lengths=batch.lengths, tokens={"advantages": advantages}, rows=rows)
