"""GRPO: group relative policy optimization, arXiv 2402.03300.

    A_i = (r_i - mean(r of its group)) / (std(r of its group) + eps),  the same for every token of response i
    loss = mean over tokens of  -min(ratio · A, clip(ratio, 1 - clip_low, 1 + clip_high) · A)  +  beta · KL(p || p_ref)

Departures from the paper, each a setting:
1. `average` is token-mean over the mini-batch (as in DAPO); the paper uses seq-mean-token-mean.
2. KL is off by default (`kl.coefficient=0`) and no reference is loaded; the paper uses k3 in the loss, 0.04.
3. `skip_zero_variance_groups` drops groups whose responses all have the same reward from the update, and from
   the mean over tokens. Their policy gradient is zero, but their KL and entropy terms are dropped too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlcore.algorithms.advantages import group_normalized, group_variance
from rlcore.algorithms.base import PolicyGradient, PolicyGradientConfig, sequence_kl
from rlcore.data.batch import Batch
from rlcore.protocols.roles import Roles
from rlcore.types import Mean


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPOConfig(PolicyGradientConfig):
    """Settings of GRPO."""

    normalize_by_std: bool = True
    """False together with average=seq-mean-token-sum gives Dr. GRPO (arXiv 2503.20783)."""
    skip_zero_variance_groups: bool = False
    """Skip prompts whose responses all have the same reward in the update."""


class GRPO(PolicyGradient):
    """Policy gradient with advantages relative to the other responses to the same prompt; no critic."""

    Config: type = GRPOConfig
    compares_samples = True
    """A single sample of a prompt has no advantage."""

    def writes(self) -> Sequence[str]:
        return list(dict.fromkeys([*super().writes(), *(["old_log_probs"] if self.kl_in_reward else [])]))

    def collect(self, roles: Roles, prompts: Batch) -> Batch:
        """Generate, score, recompute log-probs, compare within groups."""
        samples = self.draw(roles, prompts).balance(roles.actor.dp_size)
        if "old_log_probs" in self.writes():
            samples |= roles.actor.log_probs(samples).rename(log_probs="old_log_probs").drop("entropy")
        if self.needs_reference:
            samples |= roles.reference.log_probs(samples)
        reward, group_id = samples.fetch("reward", "group_id")
        varied = group_variance(reward, group_id) > 0
        kl = self._kl(roles, samples) if self.kl_in_reward else torch.zeros_like(reward)
        samples = self.with_advantages(roles, samples, reward - self.kl.coefficient * kl)
        if self.kl_in_reward:
            self.observe_kl(roles, kl)
        roles.note("experience/zero_variance_rows", Mean(float((~varied).sum())))
        if self.config.skip_zero_variance_groups:
            samples = samples.take(np.flatnonzero(varied.numpy()))
        return self.with_entropy_coefficient(roles, samples)

    def draw(self, roles: Roles, prompts: Batch) -> Batch:
        """Generate and score samples."""
        return roles.score(roles.generate(prompts))

    def with_advantages(self, roles: Roles, samples: Batch, reward: Tensor) -> Batch:
        """Add the column of advantages; `reward` [B] includes the KL penalty if `kl.where` is reward."""
        by_std = self.config.normalize_by_std
        return samples.with_rows(advantage=group_normalized(reward, samples.fetch("group_id"), by_std=by_std))

    def _kl(self, roles: Roles, samples: Batch) -> Tensor:
        """Return the KL of each response to the reference, [B]; only these numbers reach the controller."""
        columns = samples.select("old_log_probs", "ref_log_probs", "loss_mask")
        kl: Tensor = roles.actor.apply(sequence_kl, columns, estimator=self.config.kl.estimator).fetch("kl")
        return kl
