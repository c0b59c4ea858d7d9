"""Refilled groups, overlong responses, and the greedy baseline."""

import logging

import numpy as np
import pytest
import torch
from rlcore_algorithms.dapo import DAPO
from rlcore_algorithms.greedy import greedy_baseline
from rlcore_algorithms.remax import ReMax
from rlcore_algorithms.sampling import OverlongConfig, RefillConfig, overlong_penalty, refill

from rlcore.data.batch import Batch
from rlcore.errors import ConfigError
from rlcore.protocols.reward import RewardSpec
from rlcore.testing import FakeRoles
from rlcore.types import Mean

PROMPTS = Batch.of(
    lengths=[2, 1, 3],
    tokens={"input_ids": [1, 2, 3, 4, 5, 6]},
    rows={"prompt_id": [8, 5, 9], "group_id": [0, 1, 2], "seed": [1, 2, 3]},
)


def rewards_of(roles, table):
    """Return a sampler with the rewards of `table`, four for each group id; other groups have rewards 1, 0, 0, 0."""

    def sample(roles, prompts):
        samples = roles.score(roles.generate(prompts))
        group, number = samples.fetch("group_id"), samples.fetch("sample_id") % 4
        reward = [table.get(g, [1.0, 0.0, 0.0, 0.0])[n] for g, n in zip(group.tolist(), number.tolist())]
        return samples.with_rows(reward=torch.tensor(reward))

    return sample


def refilled(table, rounds):
    roles = FakeRoles(["actor"])
    samples = refill(roles, PROMPTS, rewards_of(roles, table), RefillConfig(rounds=rounds))
    return (
        sorted(set(samples.fetch("group_id").tolist())),
        {name: mean.value for name, mean in roles.metrics.items()},
        samples,
    )


def test_groups_without_variance_are_replaced_by_groups_of_further_prompts():
    # 0 and 2 have no variance; the fakes' further prompts have groups 1000, 1001, …, and 1000 has no variance either
    groups, notes, samples = refilled({0: [0.0] * 4, 2: [1.0] * 4, 1000: [0.5] * 4}, rounds=5)

    assert groups == [1, 1001, 1002]
    assert notes == {"experience/rounds": 3, "experience/groups": 3}
    assert len(samples) == 12


def test_after_the_last_round_the_step_continues_with_the_groups_found(caplog):
    with caplog.at_level(logging.WARNING):
        groups, notes, _ = refilled({0: [0.0] * 4, 2: [1.0] * 4, 1000: [0.5] * 4}, rounds=2)

    assert groups == [1, 1001]
    assert notes == {"experience/rounds": 2, "experience/groups": 2}
    assert "after 2 rounds 2 of 3 prompts have groups with variance" in caplog.text


def test_a_step_without_any_variance_has_all_columns_but_no_rows():
    groups, notes, samples = refilled({group: [1.0] * 4 for group in (0, 1, 2)}, rounds=1)

    assert groups == []
    assert notes["experience/groups"] == 0
    assert "rollout_log_probs" in samples


def test_without_refill_every_group_is_kept():
    algorithm, roles = DAPO(DAPO.Config(refill=RefillConfig(rounds=0))), FakeRoles(["actor"])
    algorithm._draw = rewards_of(roles, {0: [0.0] * 4})

    assert sorted(set(algorithm.draw(roles, PROMPTS).fetch("group_id").tolist())) == [0, 1, 2]


@pytest.mark.parametrize(
    ("length", "wanted"),
    # limit 20, tokens 8: no penalty up to 12, half of it at 16, all of it at 20
    [(1, 0.0), (12, 0.0), (13, -0.0625), (16, -0.25), (20, -0.5), (24, -0.5)],
)
def test_the_overlong_penalty_grows_over_the_last_tokens_before_the_limit(length, wanted):
    penalty = overlong_penalty(torch.tensor([length]), 20, OverlongConfig(tokens=8, factor=0.5))

    assert penalty.tolist() == pytest.approx([wanted])


def test_the_overlong_penalty_is_applied_before_responses_are_compared():
    algorithm, roles = DAPO(DAPO.Config(overlong=OverlongConfig(tokens=4))), FakeRoles(["actor"])

    samples = algorithm.draw(roles, PROMPTS)

    length, reward = samples.fetch("num_loss_tokens", "reward")
    first = samples.fetch("sample_id") % 4 == 0
    # the fakes' limit is 5 tokens: the first token is free, and each further one costs 1/4
    assert reward.tolist() == pytest.approx((first.double() - (length - 1) / 4).tolist())


class Greedy:
    """Fake rollout and rewards of greedy responses: group 0 scores 0.25, group 1 fails, others score 0."""

    def __init__(self, roles):
        self.roles, self.asked = roles, []

    def generate(self, prompts, sampling, samples_per_prompt):
        self.asked.append((sampling.temperature, samples_per_prompt))
        return prompts

    def score(self, samples):
        group = samples.fetch("group_id")
        rows = {
            "num_loss_tokens": torch.tensor([1, 2, 4]),
            "reward": torch.where(group == 0, 0.25, torch.where(group == 1, torch.nan, 0.0)),
            "reward_status": torch.where(group == 1, 3, 0),
        }
        return Batch.of(lengths=samples.lengths, rows=rows)


def test_the_baseline_is_the_greedy_reward_or_the_mean_where_that_reward_failed():
    roles = FakeRoles(["actor"])
    samples = roles.score(roles.generate(PROMPTS)).take([0, 5, 4, 9, 8])  # groups 0, 1, 1, 2, 2
    greedy = roles.groups["rollout"] = roles.groups["reward"] = Greedy(roles)

    baseline = greedy_baseline(roles, PROMPTS, samples, OverlongConfig())

    assert greedy.asked == [(0.0, 1)]
    assert baseline.tolist() == [0.25, 0.5, 0.5, 0.0, 0.0]  # group 1: samples 5 and 4 score 0 and 1
    assert roles.metrics["experience/baseline_missing"] == Mean(1.0)
    assert roles.metrics["experience/greedy_reward"].value == pytest.approx(0.125)


def test_greedy_responses_get_the_overlong_penalty_too():
    roles = FakeRoles(["actor"])
    samples = roles.score(roles.generate(PROMPTS)).take([0, 8])  # groups 0 and 2
    roles.groups["rollout"] = roles.groups["reward"] = Greedy(roles)

    baseline = greedy_baseline(roles, PROMPTS, samples, OverlongConfig(tokens=4))

    # the fakes' limit is 5 tokens: the greedy responses of groups 0 and 2 have 1 and 4 tokens
    assert baseline.tolist() == [0.25, -0.75]


def test_a_greedy_baseline_together_with_a_group_relative_reward_is_refused():
    roles = FakeRoles(["actor"])
    roles.rewards = [RewardSpec("length", "pkg:length", relative="rank")]

    with pytest.raises(ConfigError, match="'length' is relative to its group"):
        ReMax(ReMax.Config()).draw(roles, PROMPTS)


def test_the_remax_advantage_is_the_reward_minus_the_greedy_reward():
    roles, algorithm = FakeRoles(["actor", "rollout"]), ReMax(ReMax.Config())
    samples = roles.score(roles.generate(PROMPTS)).with_rows(baseline=np.linspace(0, 1, 12, dtype=np.float32))

    found = algorithm.with_advantages(roles, samples, samples.fetch("reward"))

    assert found.fetch("advantage").tolist() == pytest.approx(
        [(k % 4 == 0) - b for k, b in enumerate(np.linspace(0, 1, 12))], abs=1e-6
    )
