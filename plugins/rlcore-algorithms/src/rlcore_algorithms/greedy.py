"""The greedy baseline of ReMax: the reward of the policy's greedy response."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rlcore.algorithms.advantages import group_mean
from rlcore.data.batch import Batch
from rlcore.protocols.roles import Roles
from rlcore.types import Mean
from rlcore_algorithms.sampling import OverlongConfig, overlong_penalty


def greedy_baseline(roles: Roles, prompts: Batch, samples: Batch, overlong: OverlongConfig) -> Tensor:
    """Return for each sample the reward of its prompt's greedy response, [B] float32, with overlong penalty.

    Greedy responses are not part of the experience and not counted as samples. For one without a score, the
    mean reward of the sampled responses is used, and `experience/baseline_missing` counts it.
    """
    greedy = roles.rollout.generate(prompts, replace(roles.sampling, temperature=0.0), 1)
    greedy = roles.compute_rewards(greedy)
    group, score, status, length = greedy.fetch("group_id", "reward", "reward_status", "num_loss_tokens")
    if overlong.tokens:
        score = score + overlong_penalty(length, roles.sampling.max_response_tokens, overlong)
    known = dict(zip(group[status == 0].tolist(), score[status == 0].tolist()))
    reward, group_id = samples.fetch("reward", "group_id")
    means = group_mean(reward.double(), group_id).tolist()
    baseline = [known.get(number, mean) for number, mean in zip(group_id.tolist(), means)]
    roles.note("experience/greedy_reward", Mean(sum(known.values()), float(len(known))))
    roles.note("experience/baseline_missing", Mean(float(len(group) - len(known))))
    return torch.tensor(baseline, dtype=torch.float32)
