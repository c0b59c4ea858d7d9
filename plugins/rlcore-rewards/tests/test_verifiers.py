"""Rewards for length, patterns and mathematical answers."""

from __future__ import annotations

import sys
import threading

import pytest
from rlcore_rewards.length import Length
from rlcore_rewards.math import Math
from rlcore_rewards.regex import Regex

from rlcore.errors import ConfigError, UserError
from rlcore.testing import RewardContract
from rlcore.testing.waiting import HANG_S


class TestRegex(RewardContract):
    target = "rlcore_rewards.regex:Regex"
    options = {"pattern": r"<answer>.+</answer>"}  # noqa: RUF012
    examples = (({"completion": "<answer>4</answer>"}, 1.0), ({"completion": "4"}, 0.0))


class TestLength(RewardContract):
    target = "rlcore_rewards.length:Length"
    options = {"max": 4}  # noqa: RUF012
    # 4 tokens are the limit; 6 are half of it too many
    examples = (({"completion": "a", "num_tokens": 4}, 1.0), ({"completion": "b", "num_tokens": 6}, 0.5))


class TestMath(RewardContract):
    target = "rlcore_rewards.math:Math"
    examples = (({"completion": "$0.5$", "answer": "\\frac{1}{2}"}, 1.0), ({"completion": "2", "answer": "3"}, 0.0))


def make(cls, **options):
    return cls(cls.Config(**options))


@pytest.mark.parametrize(
    ("options", "completion", "expected"),
    [
        pytest.param({"pattern": "<a>.*</a>"}, "x <a>1</a> y", 1.0, id="part"),
        pytest.param({"pattern": "<a>.*</a>", "full": True}, "x <a>1</a> y", 0.0, id="full"),
        pytest.param({"pattern": "b"}, "aaa", 0.0, id="no_match"),
    ],
)
def test_regex(options, completion, expected):
    assert make(Regex, **options)(completion) == expected


@pytest.mark.parametrize(
    ("options", "completion", "num_tokens", "expected"),
    [
        pytest.param({"target": 10}, "", 10, 1.0, id="target_hit"),
        pytest.param({"target": 10}, "", 5, 0.5, id="half_as_long"),
        pytest.param({"target": 10}, "", 30, 0.0, id="three_times_as_long"),
        pytest.param({"max": 10}, "", 3, 1.0, id="below_max"),
        pytest.param({"max": 10}, "", 15, 0.5, id="above_max"),
        pytest.param({"max": 2, "unit": "words"}, "one two three", 99, 0.5, id="words"),
    ],
)
def test_length(options, completion, num_tokens, expected):
    assert make(Length, **options)(completion, num_tokens) == expected


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        pytest.param(r"so \boxed{0.5}", r"\frac{1}{2}", 1.0, id="fraction"),
        pytest.param("$x^2+2x+1$", "$(x+1)^2$", 1.0, id="polynomial"),
        pytest.param(r"\boxed{3}", "4", 0.0, id="wrong"),
        pytest.param("no idea", "4", 0.0, id="unreadable_answer_is_wrong"),
    ],
)
def test_math(completion, answer, expected):
    assert make(Math)(completion, answer=answer) == expected


def test_math_works_outside_the_main_thread():
    scores = []
    thread = threading.Thread(target=lambda: scores.append(make(Math)("$4$", answer="4")))

    thread.start()
    thread.join(timeout=HANG_S)

    assert scores == [1.0]


def test_math_without_its_package_is_refused_with_the_pip_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)

    with pytest.raises(
        UserError,
        match=r"needs the Python package 'math_verify', which is not installed\nType  pip install 'rlcore-rewards\[math\]'",
    ):
        make(Math)


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        pytest.param(Regex, {"pattern": "("}, "pattern='\\(' of reward 'regex' is not a regular", id="bad_pattern"),
        pytest.param(Length, {}, "set exactly one of them", id="no_length"),
        pytest.param(Length, {"target": 1, "max": 1}, "set exactly one of them", id="two_lengths"),
        pytest.param(Length, {"max": 1, "unit": "bytes"}, "unit='bytes'", id="unknown_unit"),
    ],
)
def test_bad_option_is_refused_at_construction(cls, options, message):
    with pytest.raises(ConfigError, match=message):
        make(cls, **options)
