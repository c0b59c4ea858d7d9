"""Combined rewards and the overlong penalty."""

import pytest

from rlcore.errors import ConfigError, UserError
from rlcore.protocols.reward import RewardResult
from rlcore.testing import RewardContract

COMBINED = "rlcore_rewards.combined:Combined"
LENGTH = {"name": "length", "max": 4, "weight": 0.5}


class TestGate(RewardContract):
    target = COMBINED
    options = {"how": "gate", "rewards": ["exact_match", LENGTH], "otherwise": -1.0}  # noqa: RUF012
    examples = (
        ({"completion": "42", "answer": "42", "num_tokens": 3}, 0.5),
        ({"completion": "42", "answer": "42", "num_tokens": 6}, 0.25),
        ({"completion": "41", "answer": "42", "num_tokens": 3}, -1.0),
    )


class TestProduct(TestGate):
    options = {"how": "product", "rewards": ["exact_match", {**LENGTH, "weight": 2.0}]}  # noqa: RUF012
    examples = (
        ({"completion": "42", "answer": "42", "num_tokens": 6}, 1.0),
        ({"completion": "41", "answer": "42", "num_tokens": 3}, 0.0),
    )


class TestMin(TestGate):
    options = {"how": "min", "rewards": ["exact_match", LENGTH]}  # noqa: RUF012
    examples = (
        ({"completion": "42", "answer": "42", "num_tokens": 3}, 0.5),
        ({"completion": "41", "answer": "42", "num_tokens": 3}, 0.0),
    )


class TestMax(TestGate):
    options = {"how": "max", "rewards": ["exact_match", LENGTH]}  # noqa: RUF012
    examples = (
        ({"completion": "42", "answer": "42", "num_tokens": 3}, 1.0),
        ({"completion": "41", "answer": "42", "num_tokens": 3}, 0.5),
    )


class TestOverlong(RewardContract):
    """DAPO eq. 13 with L_max = 16 and L_cache = 4."""

    target = "rlcore_rewards.overlong:Overlong"
    options = {"limit": 16, "buffer": 4, "factor": 2.0}  # noqa: RUF012
    examples = tuple(
        ({"completion": "x", "num_tokens": n}, v) for n, v in [(1, 0), (12, 0), (13, -0.5), (16, -2), (20, -2)]
    )


def skips(completion):
    return None


def fails(completion):
    raise KeyError("grade")


def measured(completion):
    return RewardResult(0.5, metrics={"words": 3.0})


def graded(data_source, solution_str, ground_truth, extra_info):
    return {"score": 0.25, "acc": 1.0, "pred": "42"}


def test_metrics_are_named_after_their_rewards(score):
    sample = {"completion": "42", "data_source": "d", "ground_truth": "42", "extra_info": {}}

    (found,) = score(COMBINED, [sample], how="product", rewards=[f"{__file__}:measured", f"{__file__}:graded"])

    assert found.value == 0.125
    assert found.metrics == {
        "mine/measured": 0.5,
        "mine/measured/words": 3.0,
        "mine/graded": 0.25,
        "mine/graded/acc": 1.0,
    }


def test_a_metric_that_is_not_a_number_is_an_error(score):
    (found,) = score(COMBINED, [{"completion": "x"}], how="min", rewards=[f"{__file__}:odd", f"{__file__}:measured"])

    assert found.status == "error"
    assert "reward 'odd': metric 'words' is 'many'" in found.message


def odd(completion):
    return RewardResult(0.5, metrics={"words": "many"})


def test_each_reward_is_a_metric(score):
    (found,) = score(COMBINED, [{"completion": "42", "answer": "42"}], **TestGate.options)

    assert found.metrics == {"mine/exact_match": 1.0, "mine/length": 1.0}


@pytest.mark.parametrize(("how", "status", "value"), [("gate", "skip", None), ("min", "score", 1.0)])
def test_a_reward_that_does_not_apply_is_left_out_unless_it_is_the_gate(score, how, status, value):
    (found,) = score(
        COMBINED, [{"completion": "42", "answer": "42"}], how=how, rewards=[f"{__file__}:skips", "exact_match"]
    )

    assert (found.status, found.value) == (status, value)


def test_a_failing_reward_is_an_error_of_the_combination(score):
    (found,) = score(COMBINED, [{"completion": "42", "answer": "42"}], rewards=["exact_match", f"{__file__}:fails"])

    assert found.status == "error"
    assert "KeyError: 'grade'" in found.message


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rewards": ["length"]}, "expected two or more names"),
        ({"rewards": ["exact_match", 3]}, "expected two or more names"),
        ({"rewards": ["exact_match", "lenght"]}, r"no reward named 'lenght'\. Did you mean 'length'\?"),
        ({"rewards": ["exact_match", {"name": "length", "target": 3, "words": 1}]}, "words"),
        ({"rewards": ["exact_match", "regex"], "how": "median"}, "is unknown\nUse gate"),
        (
            {"rewards": [{"name": "exact_match", "weight": 0.5}, "length"]},
            "weight: expected 1 for the gate",
        ),
        (
            {"rewards": ["exact_match", LENGTH], "how": "min", "threshold": 0.5},
            "threshold: expected 1.0, because how=min has",
        ),
        (
            {"rewards": ["exact_match", LENGTH], "how": "product", "otherwise": -1},
            "otherwise: expected 0.0, because how=prod",
        ),
    ],
)
def test_invalid_combinations_are_refused_at_the_start(score, options, text):
    with pytest.raises(UserError, match=text):
        score(COMBINED, [{"completion": "x"}], **options)


def test_a_missing_data_column_is_refused_before_the_start():
    from rlcore.protocols.reward import RewardSpec
    from rlcore.rewards.runner import build_reward
    from rlcore.rewards.signature import check_columns

    combined = build_reward(RewardSpec("combined", COMBINED, TestGate.options))

    with pytest.raises(ConfigError, match=r"reward 'combined' asks for column 'answer', .* Did you mean 'anser'\?"):
        check_columns("combined", combined, ["prompt", "anser"])


@pytest.mark.parametrize("options", [{"limit": 4, "buffer": 5}, {"limit": 0, "buffer": 1}, {"limit": 4, "buffer": 0}])
def test_an_invalid_buffer_or_limit_is_refused(score, options):
    with pytest.raises(ConfigError, match="expected 1"):
        score("rlcore_rewards.overlong:Overlong", [{"completion": "x"}], **options)
