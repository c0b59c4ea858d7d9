"""Advantages: hand-worked tables, comparison with loops in float64, and invariants."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.algorithms.advantages import gae, group_mean, group_normalized, group_variance
from rlcore.algorithms.ppo import estimate_advantages, last_loss_tokens
from rlcore.data.batch import Batch


def doubles(*values):
    return torch.tensor(values, dtype=torch.float64)


# Multiples of 1/4: sums and shifts are exact, and a standard deviation is 0 or much larger than the eps of 1e-6.
rewards_in_groups = st.lists(
    st.lists(st.integers(-20, 20).map(lambda n: n / 4), min_size=1, max_size=6), min_size=1, max_size=5
)


def flat(groups):
    reward = torch.tensor([r for group in groups for r in group], dtype=torch.float32)
    group_id = torch.tensor([g for g, group in enumerate(groups) for _ in group])
    return reward, group_id


def test_mean_and_variance_of_groups_that_are_not_adjacent():
    # group 7: 1, 5 -> mean 3, variance ((-2)² + 2²) / 2 = 4;  group 2: 0, 0, 6 -> mean 2, variance (4 + 4 + 16) / 3 = 8
    values, group_id = torch.tensor([1.0, 0.0, 5.0, 0.0, 6.0]), torch.tensor([7, 2, 7, 2, 2])

    assert group_mean(values, group_id).tolist() == [3.0, 2.0, 3.0, 2.0, 2.0]
    assert group_variance(values, group_id).tolist() == [4.0, 8.0, 4.0, 8.0, 8.0]


@pytest.mark.parametrize(
    ("rewards", "by_std", "expected"),
    [
        # mean 1/2; variance with n - 1: (1/4 · 4) / 3 = 1/3; 1/2 / sqrt(1/3) = sqrt(3) / 2
        pytest.param([1, 0, 0, 1], True, [math.sqrt(3) / 2, -math.sqrt(3) / 2, -math.sqrt(3) / 2, math.sqrt(3) / 2]),
        # mean 2; (4 + 1 + 9) / 2 = 7
        pytest.param([0, 1, 5], True, [-2 / math.sqrt(7), -1 / math.sqrt(7), 3 / math.sqrt(7)]),
        pytest.param([0, 1, 5], False, [-2.0, -1.0, 3.0]),
        # the standard deviation of two rewards is their distance / sqrt(2), so the advantages are always ±1/sqrt(2)
        pytest.param([3, 11], True, [-1 / math.sqrt(2), 1 / math.sqrt(2)]),
        pytest.param([4], True, [0.0], id="group-of-one"),
        pytest.param([4], False, [0.0], id="group-of-one-centered"),
        pytest.param([0.1, 0.1, 0.1], True, [0.0, 0.0, 0.0], id="no-variance"),
        pytest.param([], True, [], id="empty"),
    ],
)
def test_one_group_has_the_hand_worked_advantages(rewards, by_std, expected):
    reward = torch.tensor(rewards, dtype=torch.float32)

    advantage = group_normalized(reward, torch.zeros(len(rewards), dtype=torch.int64), by_std=by_std, eps=1e-12)

    assert advantage.dtype == torch.float32
    assert advantage.tolist() == pytest.approx(expected, abs=1e-6)


def test_eps_is_added_to_the_standard_deviation():
    # mean 1, std sqrt(2): 1 / (sqrt(2) + 0.5)
    advantage = group_normalized(torch.tensor([0.0, 2.0]), torch.zeros(2, dtype=torch.int64), eps=0.5)

    assert advantage[1].item() == pytest.approx(1 / (math.sqrt(2) + 0.5))


def test_equal_rewards_in_float32_have_a_variance_of_exactly_zero():
    reward = torch.full((7,), 0.1)

    assert group_variance(reward, torch.zeros(7, dtype=torch.int64)).tolist() == [0.0] * 7


@settings(max_examples=60)
@given(rewards_in_groups, st.booleans())
def test_group_advantages_agree_with_a_loop_in_float64(groups, by_std):
    reward, group_id = flat(groups)
    expected = []
    for group in groups:
        mean = math.fsum(group) / len(group)
        std = math.sqrt(math.fsum((r - mean) ** 2 for r in group) / max(1, len(group) - 1))
        expected += [(r - mean) / (std + 1e-6 if by_std else 1.0) for r in group]

    assert group_normalized(reward, group_id, by_std=by_std).tolist() == pytest.approx(expected, abs=1e-6)


@settings(max_examples=40)
@given(rewards_in_groups, st.integers(-8, 8), st.sampled_from([0.5, 2.0, 8.0]))
def test_shifting_and_scaling_all_rewards_does_not_change_normalized_advantages(groups, shift, scale):
    reward, group_id = flat(groups)
    before = group_normalized(reward, group_id)

    assert torch.allclose(group_normalized(reward * scale + shift, group_id), before, atol=1e-4)
    assert torch.equal(
        group_normalized(reward + shift, group_id, by_std=False), group_normalized(reward, group_id, by_std=False)
    )


@settings(max_examples=40)
@given(rewards_in_groups, st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(groups, random):
    reward, group_id = flat(groups)
    order = list(range(len(reward)))
    random.shuffle(order)

    shuffled = group_normalized(reward[order], group_id[order])

    assert torch.allclose(shuffled, group_normalized(reward, group_id)[order], atol=1e-6)


@settings(max_examples=40)
@given(rewards_in_groups)
def test_advantages_of_a_group_sum_to_zero(groups):
    reward, group_id = flat(groups)

    assert torch.allclose(group_mean(group_normalized(reward, group_id), group_id), torch.zeros(len(reward)), atol=1e-5)


def test_gae_of_one_response_by_hand():
    # V = 0.5, 1.0, 0.25; the reward 2 comes last; gamma 0.9, lam 0.5, gamma · lam = 0.45
    # delta_3 = 2 - 0.25                = 1.75     A_3 = 1.75                       R_3 = 2.0
    # delta_2 = 0.9 · 0.25 - 1.0        = -0.775   A_2 = -0.775 + 0.45 · 1.75   = 0.0125     R_2 = 1.0125
    # delta_1 = 0.9 · 1.0 - 0.5         = 0.4      A_1 = 0.4 + 0.45 · 0.0125    = 0.405625   R_1 = 0.905625
    rewards, values = doubles(9, 0, 0, 2), doubles(9, 0.5, 1.0, 0.25)
    mask = torch.tensor([False, True, True, True])

    advantages, returns = gae(rewards, values, mask, torch.tensor([4]), gamma=0.9, lam=0.5)

    assert advantages.tolist() == pytest.approx([0, 0.405625, 0.0125, 1.75], abs=1e-12)
    assert returns.tolist() == pytest.approx([0, 0.905625, 1.0125, 2.0], abs=1e-12)


@pytest.mark.parametrize(
    ("gamma", "lam", "advantages"),
    [
        # V = 1, 3; rewards 0.5, 2
        pytest.param(1.0, 1.0, [2.5 - 1, 2 - 3], id="lam-1-is-return-minus-value"),
        pytest.param(1.0, 0.0, [0.5 + 3 - 1, 2 - 3], id="lam-0-is-one-step-error"),
        pytest.param(0.0, 0.7, [0.5 - 1, 2 - 3], id="gamma-0-sees-only-its-own-reward"),
    ],
)
def test_gae_with_gamma_and_lam_of_0_or_1(gamma, lam, advantages):
    mask, lengths = torch.tensor([True, True]), torch.tensor([2])

    result, returns = gae(doubles(0.5, 2), doubles(1, 3), mask, lengths, gamma=gamma, lam=lam)

    assert result.tolist() == advantages
    assert (returns - result).tolist() == [1, 3]


def test_gae_of_a_single_token_is_reward_minus_value():
    advantages, returns = gae(doubles(2), doubles(0.75), torch.tensor([True]), torch.tensor([1]), gamma=0.9, lam=0.9)

    assert (advantages.item(), returns.item()) == (1.25, 2.0)


@pytest.mark.parametrize("lengths", [[], [2], [2, 0, 3]], ids=["no-rows", "no-loss-token", "several-without"])
def test_gae_without_loss_tokens_is_zero(lengths):
    total = sum(lengths)

    advantages, returns = gae(
        torch.ones(total), torch.ones(total), torch.zeros(total, dtype=torch.bool),
        torch.tensor(lengths, dtype=torch.int64), gamma=1.0, lam=1.0,
    )  # fmt: skip

    assert advantages.tolist() == returns.tolist() == [0.0] * total


def test_gae_skips_tokens_that_the_model_did_not_write():
    # a tool's result is between two turns: the state after the first turn is that of the second turn
    mask = torch.tensor([False, True, False, False, True])
    whole = gae(doubles(7, 0.5, 7, 7, 2), doubles(7, 1, 7, 7, 3), mask, torch.tensor([5]), gamma=0.9, lam=0.8)

    short = gae(doubles(0.5, 2), doubles(1, 3), torch.tensor([True, True]), torch.tensor([2]), gamma=0.9, lam=0.8)

    assert [column[mask].tolist() for column in whole] == [column.tolist() for column in short]
    assert whole[0][~mask].tolist() == whole[1][~mask].tolist() == [0, 0, 0]


def gae_by_loop(rewards, values, mask, lengths, gamma, lam):
    advantages, start = [0.0] * len(rewards), 0
    for length in lengths:
        after, value_after = 0.0, 0.0
        for t in reversed(range(start, start + length)):
            if mask[t]:
                after = rewards[t] + gamma * value_after - values[t] + gamma * lam * after
                advantages[t], value_after = after, values[t]
        start += length
    return advantages


numbers = st.floats(-4, 4, width=32)


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.tuples(numbers, numbers, st.booleans()), max_size=6), max_size=5),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_gae_agrees_with_a_loop_in_float64(samples, gamma, lam):
    tokens = [token for sample in samples for token in sample]
    rewards, values, mask = ([token[i] for token in tokens] for i in range(3))
    lengths = [len(sample) for sample in samples]

    advantages, returns = gae(
        doubles(*rewards), doubles(*values), torch.tensor(mask, dtype=torch.bool),
        torch.tensor(lengths, dtype=torch.int64), gamma=gamma, lam=lam,
    )  # fmt: skip

    expected = gae_by_loop(rewards, values, mask, lengths, gamma, lam)
    assert advantages.tolist() == pytest.approx(expected, abs=1e-9)
    assert returns.tolist() == pytest.approx([m * (a + v) for m, a, v in zip(mask, expected, values)], abs=1e-9)


def experience(**rows):
    """Make two responses of two tokens, each after a prompt token, and a row without a response."""
    return Batch.of(
        lengths=[3, 1, 3],
        tokens={
            "loss_mask": [False, True, True, False, False, True, True],
            "old_log_probs": torch.tensor([0.0, -1.0, -2.0, 0.0, 0.0, -1.0, -1.0]),
            "values": torch.tensor([9.0, 0.5, 0.25, 9.0, 9.0, 0.0, 1.0]),
            **rows,
        },
        rows={"reward": [2.0, 5.0, -1.0]},
    )


def test_the_score_is_the_reward_of_the_last_token_of_each_response():
    options = {"gamma": 1.0, "lam": 1.0, "kl_coefficient": 0.0, "kl_estimator": "k1"}

    estimated = estimate_advantages(experience(), **options)

    assert estimated["rewards"].tolist() == [0, 0, 2, 0, 0, 0, -1]
    assert estimated["returns"].tolist() == [0, 2, 2, 0, 0, -1, -1]
    assert estimated["advantages"].tolist() == [0, 1.5, 1.75, 0, 0, -1, -2]
    assert estimated["advantage_sum"].tolist() == [3.25, 0, -3]
    assert estimated["advantage_squares"].tolist() == [1.5**2 + 1.75**2, 0, 5]


def test_kl_is_subtracted_from_the_reward_of_every_token():
    # k1 = old - ref: 0.5 and -1 in the first response, 0 and 2 in the second; the prompt's 5 is masked
    ref = torch.tensor([5.0, -1.5, -1.0, 5.0, 5.0, -1.0, -3.0])

    estimated = estimate_advantages(
        experience(ref_log_probs=ref), gamma=1.0, lam=1.0, kl_coefficient=0.5, kl_estimator="k1"
    )

    assert estimated["rewards"].tolist() == [0, -0.25, 2.5, 0, 0, 0, -2]
    assert estimated["kl"].tolist() == [-0.5, 0, 2]


@pytest.mark.parametrize(
    ("mask", "lengths", "expected"),
    [
        ([0, 1, 1, 0, 1], [3, 2], [2, 4]),
        ([0, 1, 1, 0, 0], [3, 2], [2]),
        ([1, 1, 0], [3], [1]),
        ([1, 1], [1, 1], [0, 1]),
        ([], [], []),
    ],
)
def test_last_loss_tokens_of_rows_that_have_any(mask, lengths, expected):
    mask = torch.tensor(mask, dtype=torch.bool)

    assert last_loss_tokens(mask, torch.tensor(lengths, dtype=torch.int64)).tolist() == expected


def test_gae_of_a_row_does_not_depend_on_other_rows():
    generator = torch.Generator().manual_seed(0)
    lengths = [3, 1, 4]
    rewards, values = torch.randn(2, 8, generator=generator)
    mask = torch.tensor([False, True, True, True, False, True, True, True])
    whole, _ = gae(rewards, values, mask, torch.tensor(lengths), gamma=0.9, lam=0.9)

    cuts = [0, 3, 4, 8]
    alone = [
        gae(rewards[a:b], values[a:b], mask[a:b], torch.tensor([b - a]), gamma=0.9, lam=0.9)[0]
        for a, b in pairwise(cuts)
    ]

    assert torch.equal(whole, torch.cat(alone))
