"""Advantages: hand-worked tables, independent loops in float64, and invariants."""

import math

import pytest
import torch
from rlcore_algorithms.estimators import ROW_ESTIMATORS, returns_to_go
from rlcore_algorithms.whitened import token_returns, whitened_returns

from rlcore.data.batch import Batch
from rlcore.testing import FakeRoles

# Two prompts: rewards 1, 0, 0, 1 with lengths 2, 1, 3, 2; and a prompt whose responses all have 0.5.
REWARD = torch.tensor([1.0, 0.5, 0.0, 0.0, 0.5, 1.0])
GROUP = torch.tensor([7, 3, 7, 7, 3, 7])
LENGTH = torch.tensor([2, 4, 1, 3, 1, 2])


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        # group 7 has mean 1/2 and sample standard deviation sqrt(4 · 1/4 / 3) = 0.57735
        pytest.param("grpo", [0.866024, 0, -0.866024, -0.866024, 0, 0.866024], id="grpo"),
        pytest.param("dr_grpo", [0.5, 0, -0.5, -0.5, 0, 0.5], id="dr-grpo"),
        # the first's other responses have 0, 0, 1: 1 - 1/3; the third's have 1, 0, 1: 0 - 2/3
        pytest.param("rloo", [2 / 3, 0, -2 / 3, -2 / 3, 0, 2 / 3], id="rloo"),
        # the mean of all six is 1/2
        pytest.param("reinforce", [0.5, 0, -0.5, -0.5, 0, 0.5], id="reinforce"),
        # (2 · 1 + 1 · 0 + 3 · 0 + 2 · 1) / 8 = 1/2 in group 7
        pytest.param("opo", [0.5, 0, -0.5, -0.5, 0, 0.5], id="opo"),
        # alpha = 6 responses / 4 in groups with variance
        pytest.param("gpg", [0.75, 0, -0.75, -0.75, 0, 0.75], id="gpg"),
        # over 13 tokens: mean (2 · .5 - 1 · .5 - 3 · .5 + 2 · .5) / 13 = 0, variance 8 · 0.25 / 13
        pytest.param(
            "reinforce_plus_plus_baseline",
            [0.5 / math.sqrt(2 / 13) * sign for sign in (1, 0, -1, -1, 0, 1)],
            id="reinforce++-baseline",
        ),
    ],
)
def test_advantages_of_a_hand_worked_step(name, wanted):
    assert ROW_ESTIMATORS[name](REWARD, GROUP, LENGTH).tolist() == pytest.approx(wanted, abs=2e-6)


def test_opo_weights_the_baseline_by_length():
    # (1 · 1 + 3 · 0) / 4 = 1/4
    advantage = ROW_ESTIMATORS["opo"](torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), torch.tensor([1, 3]))

    assert advantage.tolist() == pytest.approx([0.75, -0.25])


def published(name, reward, group, length):
    """Evaluate the formulas of papers and other implementations, one response at a time."""
    found = []
    tokens = [(r - mean_of(reward, group, g)) for r, g, n in zip(reward, group, length) for _ in range(n)]
    mean = sum(tokens) / len(tokens)
    std = math.sqrt(sum((a - mean) ** 2 for a in tokens) / len(tokens) + 1e-8)
    varied = sum(len({r for r, h in zip(reward, group) if h == g}) > 1 for g in group)
    for i, (r, g) in enumerate(zip(reward, group)):
        members = [j for j, other in enumerate(group) if other == g]
        others = [reward[j] for j in members if j != i]
        centered = r - mean_of(reward, group, g)
        deviation = math.sqrt(sum((reward[j] - mean_of(reward, group, g)) ** 2 for j in members) / (len(members) - 1))
        n = len(members)
        total_length = sum(length[j] for j in members)
        found.append(
            {
                "grpo": centered / (deviation + 1e-6),
                "dr_grpo": centered,
                "reinforce": r - sum(reward) / len(reward),
                # verl's form: r · n/(n-1) - mean · n/(n-1); TRL's: r - (sum - r)/(n-1)
                "rloo": r * n / (n - 1) - mean_of(reward, group, g) * n / (n - 1),
                "opo": r - sum(length[j] * reward[j] for j in members) / total_length,
                "gpg": len(reward) / varied * centered,
                "reinforce_plus_plus_baseline": (centered - mean) / std,
            }[name]
        )
        assert name != "rloo" or found[-1] == pytest.approx(r - sum(others) / len(others))
    return found


def mean_of(reward, group, wanted):
    members = [r for r, g in zip(reward, group) if g == wanted]
    return sum(members) / len(members)


@pytest.mark.parametrize("name", ROW_ESTIMATORS)
def test_advantages_agree_with_the_published_formulas(name):
    generator = torch.Generator().manual_seed(3)
    reward = torch.rand(24, generator=generator)
    reward[:4] = 0.25
    group = torch.arange(6).repeat_interleave(4)
    order = torch.randperm(24, generator=generator)
    reward, group = reward[order], group[order]
    length = torch.randint(1, 30, (24,), generator=generator)

    found = ROW_ESTIMATORS[name](reward, group, length)

    wanted = published(name, reward.double().tolist(), group.tolist(), length.tolist())
    assert found.tolist() == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("name", ROW_ESTIMATORS)
def test_a_single_response_has_advantage_0_and_no_responses_have_none(name):
    one = ROW_ESTIMATORS[name](torch.tensor([0.3]), torch.tensor([5]), torch.tensor([4]))
    none = ROW_ESTIMATORS[name](
        torch.tensor([]), torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64)
    )

    assert one.tolist() == pytest.approx([0.0], abs=1e-6)
    assert len(none) == 0


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "gpg"])
def test_adding_a_constant_to_the_rewards_of_a_prompt_changes_nothing(name):
    shifted = REWARD + torch.where(GROUP == 7, 10.0, 0.0)

    assert ROW_ESTIMATORS[name](shifted, GROUP, LENGTH) == pytest.approx(
        ROW_ESTIMATORS[name](REWARD, GROUP, LENGTH), abs=1e-5
    )


# sample 1 has loss tokens 1 and 3 (2 is an observation), sample 2 has none, sample 3 is 5, 6
MASK = torch.tensor([0, 1, 0, 1, 0, 1, 1], dtype=torch.bool)
LENGTHS = torch.tensor([4, 1, 2])


@pytest.mark.parametrize(
    ("gamma", "wanted"),
    [
        # 3: 2;  1: -1 + gamma · 2;   6: 4;  5: 0.5 + gamma · 4
        pytest.param(1.0, [0, 1, 0, 2, 0, 4.5, 4], id="undiscounted"),
        pytest.param(0.5, [0, 0, 0, 2, 0, 2.5, 4], id="discounted"),
    ],
)
def test_returns_skip_tokens_outside_the_mask(gamma, wanted):
    rewards = torch.tensor([9.0, -1.0, 9.0, 2.0, 9.0, 0.5, 4.0], dtype=torch.float64)

    assert returns_to_go(rewards, MASK, LENGTHS, gamma).tolist() == wanted


def test_token_rewards_are_the_negative_penalty_plus_the_score_at_the_last_token():
    batch = Batch.of(
        lengths=LENGTHS,
        tokens={
            "loss_mask": MASK,
            "old_log_probs": torch.tensor([0.0, -1.0, 0.0, -2.0, 0.0, -1.0, -1.0]),
            "ref_log_probs": torch.tensor([5.0, -2.0, 5.0, -2.0, 5.0, -1.5, -1.0]),
        },
        rows={"reward": [1.0, 7.0, 0.0]},
    )

    found = token_returns(batch, gamma=1.0, kl=0.1, estimator="k1")

    # k1 = log p - log p_ref: 1 at token 1, 0.5 at token 5; the score of the row without loss tokens is lost
    assert found["returns"].tolist() == pytest.approx([0, 0.9, 0, 1.0, 0, -0.05, 0])
    assert found["return_sum"].tolist() == pytest.approx([1.9, 0, -0.05])


def test_whitened_returns_have_mean_0_and_standard_deviation_1_over_the_loss_tokens_of_the_step():
    roles = FakeRoles(["actor"])
    prompts = Batch.of(lengths=[2, 3], tokens={"input_ids": [1, 2, 3, 4, 5]}, rows={"group_id": [0, 1], "seed": [1, 2]})
    samples = roles.score(roles.generate(prompts))

    found = whitened_returns(roles, samples, gamma=0.9, kl=0.0, estimator="k1").local()

    advantages = found["advantages"][found["loss_mask"]].double()
    assert float(advantages.mean()) == pytest.approx(0, abs=1e-6)
    assert float(advantages.std(unbiased=False)) == pytest.approx(1, abs=1e-4)
    assert not found["advantages"][~found["loss_mask"]].any()
