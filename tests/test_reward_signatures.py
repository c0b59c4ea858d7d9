"""Columns that rewards read, and calls of rewards that were written for other trainers."""

from __future__ import annotations

import functools
import pathlib

import pytest

from rlcore.errors import ConfigError, SampleError
from rlcore.protocols.reward import batched
from rlcore.rewards.signature import arguments, check_columns, list_arguments, read_signature, required_columns

ROW = {
    "prompt": "2+2=",
    "completion": "4",
    "num_tokens": 2,
    "finish_reason": "stop",
    "prompt_id": 7,
    "sample_id": 56,
    "answer": "4",
}


def plain(completion, answer): ...
def with_fields(completion, prompt, num_tokens, finish_reason, prompt_id, sample_id): ...
def with_default(completion, answer, unit="cm"): ...
def with_all(completion, **columns): ...
async def asynchronous(completion, answer): ...
def verl(data_source, solution_str, ground_truth, extra_info=None): ...
def verl_with_options(data_source, solution_str, ground_truth, extra_info=None, **kwargs): ...
def trl(prompts, completions, answer, **kwargs): ...
def trl_without_prompts(completions, **kwargs): ...


@batched
def lists(completion, answer): ...


@batched
class MarkedClass:
    def __call__(self, completion, answer): ...


class MarkedMethod:
    @batched
    def __call__(self, completion, answer): ...


class AsyncMethod:
    required_columns = ("gold",)

    async def __call__(self, completion, **columns): ...


@pytest.mark.parametrize(
    ("function", "convention", "is_batched", "is_async", "columns"),
    [
        pytest.param(plain, "rlcore", False, False, {"answer"}, id="plain"),
        pytest.param(with_fields, "rlcore", False, False, set(), id="sample_fields"),
        pytest.param(with_default, "rlcore", False, False, {"answer"}, id="default_is_optional"),
        pytest.param(with_all, "rlcore", False, False, set(), id="all_columns"),
        pytest.param(functools.partial(plain, answer="4"), "rlcore", False, False, set(), id="bound_option"),
        pytest.param(asynchronous, "rlcore", False, True, {"answer"}, id="async"),
        pytest.param(lists, "rlcore", True, False, {"answer"}, id="batched"),
        pytest.param(MarkedClass(), "rlcore", True, False, {"answer"}, id="batched_class"),
        pytest.param(MarkedMethod(), "rlcore", True, False, {"answer"}, id="batched_method"),
        pytest.param(AsyncMethod(), "rlcore", False, True, {"gold"}, id="async_method_declared_column"),
        pytest.param(verl, "verl", False, False, {"data_source", "ground_truth"}, id="verl"),
        pytest.param(trl, "trl", True, False, {"answer"}, id="trl"),
        pytest.param(trl_without_prompts, "trl", True, False, set(), id="trl_without_prompts"),
    ],
)
def test_signature_is_recognized_by_parameters(function, convention, is_batched, is_async, columns):
    signature = read_signature(function)

    assert (signature.convention, signature.batched, signature.is_async) == (convention, is_batched, is_async)
    assert required_columns(function) == columns


def test_positional_only_parameter_is_refused():
    def reward(completion, /): ...

    with pytest.raises(ConfigError, match=r"'completion' of .* is positional-only\nRemove the '/'"):
        read_signature(reward)


def test_missing_column_is_refused_with_the_nearest_name():
    def reward(completion, answr): ...

    with pytest.raises(ConfigError) as caught:
        check_columns("x", reward, ["prompt", "answer"], source="train.jsonl")

    assert str(caught.value) == (
        "reward 'x' asks for column 'answr', which train.jsonl does not have. Did you mean 'answer'?\n"
        "Its columns: answer, prompt"
    )


@pytest.mark.parametrize(
    ("function", "columns"),
    [
        pytest.param(plain, ["answer"], id="column_is_there"),
        pytest.param(with_default, ["answer"], id="optional_column_is_not"),
        pytest.param(verl, ["data_source", "ground_truth"], id="verl"),
        pytest.param(verl, ["data_source", "reward_model"], id="verl_nested_ground_truth"),
    ],
)
def test_columns_that_suffice_are_accepted(function, columns):
    check_columns("x", function, columns)


@pytest.mark.parametrize(
    ("function", "row", "expected"),
    [
        pytest.param(plain, ROW, {"completion": "4", "answer": "4"}, id="plain"),
        pytest.param(
            with_fields, ROW, {name: value for name, value in ROW.items() if name != "answer"}, id="sample_fields"
        ),
        pytest.param(with_default, ROW, {"completion": "4", "answer": "4"}, id="absent_optional_is_left_out"),
        pytest.param(
            with_default, {**ROW, "unit": "m"}, {"completion": "4", "answer": "4", "unit": "m"}, id="optional_is_filled"
        ),
        pytest.param(functools.partial(plain, answer="9"), ROW, {"completion": "4"}, id="option_wins_over_column"),
        pytest.param(with_all, ROW, ROW, id="all_columns"),
        pytest.param(
            functools.partial(with_all, unit="m"), {**ROW, "unit": "kg"}, ROW, id="option_wins_over_column_of_all"
        ),
        pytest.param(
            verl,
            {**ROW, "data_source": "d", "ground_truth": "4", "extra_info": {"i": 1}},
            {"data_source": "d", "solution_str": "4", "ground_truth": "4", "extra_info": {"i": 1}},
            id="verl",
        ),
        pytest.param(
            verl_with_options,
            {**ROW, "data_source": "d", "reward_model": {"ground_truth": "5"}},
            {"data_source": "d", "solution_str": "4", "ground_truth": "5"},
            id="verl_nested_ground_truth_no_stray_columns",
        ),
    ],
)
def test_arguments_follow_the_convention(function, row, expected):
    assert arguments(read_signature(function), row) == expected


def test_trl_receives_lists():
    rows = [{"prompt": "a", "completion": "1", "answer": "x"}, {"prompt": "b", "completion": "2", "answer": "y"}]

    given = list_arguments(read_signature(trl), rows)

    assert given["prompts"] == ["a", "b"]
    assert given["completions"] == ["1", "2"]
    assert given["answer"] == ["x", "y"]


def test_mutable_arguments_are_copies():
    row = {"completion": "4", "answer": ["4"]}

    arguments(read_signature(plain), row)["answer"].append("5")

    assert row == {"completion": "4", "answer": ["4"]}


def test_column_missing_from_a_sample_is_named():
    with pytest.raises(SampleError, match="asks for column 'answer', which the sample does not have"):
        arguments(read_signature(plain), {"completion": "4"})


def test_rewards_import_no_heavy_library():
    import subprocess
    import sys

    code = (
        "import sys; before = set(sys.modules); import rlcore.rewards.executor, rlcore.rewards.match;"
        "print(sorted({name.partition('.')[0] for name in set(sys.modules) - before} &"
        "{'torch', 'ray', 'numpy', 'transformers', 'hydra', 'sympy', 'math_verify', 'asyncio', 'tensordict'}))"
    )
    root = pathlib.Path(read_signature.__code__.co_filename).parents[2]

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)

    assert done.stdout == "[]\n"
