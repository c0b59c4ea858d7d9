"""The built-in rewards, and the conversion of outcomes to numbers."""

from __future__ import annotations

import math

import pytest

from rlcore.errors import ConfigError, SampleError
from rlcore.rewards.match import GSM8K, ExactMatch, NumberMatch, last_number
from rlcore.rewards.pipeline import Outcome, RewardPart, combine, final_rewards
from rlcore.rewards.sorted_digits import sorted_digits
from rlcore.types import Mean


def make(cls, **options):
    return cls(cls.Config(**options))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("6 x 7 = 42.", 42, id="end_of_sentence"),
        pytest.param("$1,234.50", 1234.5, id="dollars_and_commas"),
        pytest.param("-$5", -5, id="sign_before_dollar"),
        pytest.param("$-5", -5, id="sign_after_dollar"),
        pytest.param("about 50%", 50, id="percent"),
        pytest.param("10-3", 3, id="minus_between_digits_is_an_operator"),
        pytest.param("x = -3", -3, id="minus_is_a_sign"),
        pytest.param("\u22127", -7, id="unicode_minus"),
        pytest.param("--5", -5, id="two_signs"),
        pytest.param("1, 2, 3", 3, id="list"),
        pytest.param(".5", 0.5, id="no_leading_zero"),
        pytest.param("2e3", 2000, id="exponent"),
        pytest.param("1" * 40, int("1" * 40), id="forty_digits"),
        pytest.param("none", None, id="no_number"),
        pytest.param("", None, id="empty"),
    ],
)
def test_last_number(text, expected):
    assert last_number(text) == expected


@pytest.mark.parametrize(
    ("options", "completion", "columns", "expected"),
    [
        pytest.param({}, " Paris\n", {"answer": "Paris"}, 1.0, id="stripped"),
        pytest.param({}, "paris", {"answer": "Paris"}, 0.0, id="case_matters"),
        pytest.param({"ignore_case": True}, "paris", {"answer": "Paris"}, 1.0, id="ignore_case"),
        pytest.param({"strip": False}, "Paris ", {"answer": "Paris"}, 0.0, id="not_stripped"),
        pytest.param({"column": "city"}, "Paris", {"city": "Paris", "answer": "x"}, 1.0, id="other_column"),
        pytest.param({}, "4", {"answer": 4}, 1.0, id="column_of_numbers"),
    ],
)
def test_exact_match(options, completion, columns, expected):
    assert make(ExactMatch, **options)(completion, **columns) == expected


@pytest.mark.parametrize(
    ("options", "completion", "answer", "expected"),
    [
        pytest.param({}, "it is 1,000 then", 1000, 1.0, id="int_column"),
        pytest.param({}, "3.14", 3.14159, 0.0, id="exact_by_default"),
        pytest.param({"tolerance": 0.01}, "3.14", 3.14159, 1.0, id="within_tolerance"),
        pytest.param({}, "I don't know", "7", 0.0, id="no_number"),
        pytest.param({}, "5 or 6", "5", 0.0, id="last_one_counts"),
    ],
)
def test_number(options, completion, answer, expected):
    assert make(NumberMatch, **options)(completion, answer=answer) == expected


def test_answer_column_without_number_is_an_error_not_zero():
    with pytest.raises(SampleError, match="column 'answer' holds 'abc', which has no number"):
        make(NumberMatch)("5", answer="abc")


@pytest.mark.parametrize(
    ("method", "completion", "answer", "expected"),
    [
        pytest.param("strict", "so\n#### 42", "6*7=42\n#### 42", 1.0, id="hashes"),
        pytest.param("strict", r"\boxed{42}", "42", 1.0, id="boxed"),
        pytest.param("strict", "The answer is: $1,042.", "#### 1042", 1.0, id="answer_is"),
        pytest.param("strict", "it makes 42", "#### 42", 0.0, id="strict_wants_a_stated_answer"),
        pytest.param("flexible", "it makes 42", "#### 42", 1.0, id="flexible_takes_the_last_number"),
        pytest.param("flexible", "#### 42 apples on 3 trees", "#### 42", 1.0, id="stated_before_last"),
        pytest.param("flexible", "#### -42", "#### 42", 0.0, id="sign_matters"),
        pytest.param("flexible", "", "#### 42", 0.0, id="empty"),
    ],
)
def test_gsm8k(method, completion, answer, expected):
    assert make(GSM8K, method=method)(completion, answer=answer) == expected


@pytest.mark.parametrize(
    ("completion", "finish_reason", "expected"),
    [
        pytest.param("1249", "stop", 1.0, id="sorted"),
        pytest.param("1249", "length", 0.0, id="not_ended"),
        pytest.param("1294", "stop", 0.5 * 2 / 3, id="two_of_three_pairs"),
        pytest.param("9421", "stop", 0.0, id="backwards"),
        pytest.param("124", "stop", 0.0, id="digit_lost"),
        pytest.param("12499", "stop", 0.0, id="digit_invented"),
        pytest.param("", "stop", 0.0, id="empty"),
    ],
)
def test_sorted_digits(completion, finish_reason, expected):
    assert sorted_digits(completion, "4291", finish_reason) == expected


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        pytest.param(GSM8K, {"method": "loose"}, "method='loose'", id="unknown_method"),
    ],
)
def test_bad_option_is_refused_at_construction(cls, options, message):
    with pytest.raises(ConfigError, match=message):
        make(cls, **options)


SCORE, SKIP = RewardPart("score", 0.5), RewardPart("skip")
TIMEOUT, ERROR = RewardPart("timeout", message="late"), RewardPart("error", message="boom")


@pytest.mark.parametrize(
    ("parts", "status", "value", "failed"),
    [
        pytest.param([SCORE, SCORE], "score", 1.5, None, id="weighted_sum"),
        pytest.param([SKIP, SCORE], "score", 1.0, None, id="partial_skip"),
        pytest.param([SKIP, SKIP], "skip", None, None, id="all_skip"),
        pytest.param([SCORE, TIMEOUT], "timeout", None, "b", id="timeout_is_no_number"),
        pytest.param([ERROR, TIMEOUT], "error", None, "a", id="first_failure_decides"),
    ],
)
def test_parts_combine_into_one_outcome(parts, status, value, failed):
    outcome = combine({"a": 1.0, "b": 2.0}, parts, {"sample_id": 3, "prompt_id": 1})

    assert (outcome.status, outcome.value, outcome.reward) == (status, value, failed)
    assert outcome.parts == {"a": parts[0].value, "b": parts[1].value}
    assert (outcome.sample_id, outcome.prompt_id) == (3, 1)


MIXED = [
    Outcome(status="score", value=0.0, parts={"a": 0.0}),
    Outcome(status="skip", parts={"a": None}),
    Outcome(status="timeout", parts={"a": None}, reward="a", message="late", sample_id=2, prompt_id=0),
    Outcome(status="error", parts={"a": None}, reward="a", message="boom", sample_id=3, prompt_id=0),
    Outcome(status="score", value=1.0, parts={"a": 1.0}, metrics={"a/format": 0.25}),
]


@pytest.mark.parametrize(
    ("on_error", "keep"),
    [
        pytest.param("drop", [True, False, False, False, True], id="drop"),
        pytest.param("zero", [True, False, True, True, True], id="zero"),
    ],
)
def test_settle_keeps_samples_according_to_on_error_and_counts_the_rest(on_error, keep):
    final = final_rewards(MIXED, on_error)

    assert final.keep == keep
    assert [value for value, kept in zip(final.rewards, keep, strict=True) if kept][-1] == 1.0
    assert all(math.isnan(value) for value, kept in zip(final.rewards, keep, strict=True) if not kept)
    assert final.counts == {"score": 2, "skip": 1, "timeout": 1, "error": 1}
    assert final.metrics == {"reward/a": Mean(1.0, 2.0), "reward/a/format": Mean(0.25, 1.0)}
    assert final.messages == [
        "reward 'a' on sample 2 of prompt 0: late",
        "reward 'a' on sample 3 of prompt 0: boom",
    ]


@pytest.mark.parametrize(
    ("outcomes", "message"),
    [
        pytest.param(
            MIXED,
            "reward 'a' on sample 2 of prompt 0: late (2 of 5 samples have no reward)\n"
            "Increase reward.timeout_s=..., or drop such samples: reward.on_error=drop",
            id="timeout",
        ),
        pytest.param(
            MIXED[3:],
            "reward 'a' on sample 3 of prompt 0: boom\nFix the reward, or drop such samples: reward.on_error=drop",
            id="error",
        ),
    ],
)
def test_settle_raises_with_reward_sample_and_what_to_type(outcomes, message):
    with pytest.raises(SampleError) as caught:
        final_rewards(outcomes, "raise")

    assert str(caught.value) == message


def test_skips_do_not_raise():
    assert final_rewards(MIXED[:2], "raise").keep == [True, False]
