"""`rlcore check`: the choice of the suite, the report and the exit code."""

import json
from pathlib import Path

import pytest
from rlcore_workbench import suites
from rlcore_workbench.check import main

from rlcore.errors import UserError
from rlcore.testing import (
    AlgorithmContract,
    BackendContract,
    DispatchContract,
    ModelRolloutContract,
    RowDispatchContract,
    TrackerContract,
)

REWARDS = """
import os, time

EXAMPLES = {
    "good": [({"completion": "abc"}, 1.0), ({"completion": ""}, 0.0)],
    "fragile": [({"completion": "4"}, 4.0)],
    "wrong": [({"completion": "4"}, 5.0)],
    "deaf": [({"completion": "4"}, 4.0)],
    "dead": [({"completion": "4"}, 4.0)],
    "odd": ["4"],
}
def good(completion): return float("b" in completion)
def fragile(completion): return float(completion)
def wrong(completion): return 4.0
def deaf(completion): time.sleep(60)
def dead(completion): os._exit(7)
def odd(completion): return 1.0
def graded(completion, answer): return float(completion == answer)
def plain(completion): return float(len(completion))
"""


@pytest.fixture
def rewards(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.py").write_text(REWARDS)
    return tmp_path


def check(capsys, *arguments):
    code = main(list(map(str, arguments)))
    return code, capsys.readouterr().out


def test_a_reward_with_its_own_examples_passes_line_by_line(rewards, capsys):
    code, out = check(capsys, "reward", "r.py:good")

    first, *lines, last = out.splitlines()
    assert code == 0
    assert first == f"check reward r.py:good ({rewards}/r.py:good)"
    assert [line.split("  ")[1] for line in lines] == ["ok"] * 7
    assert "  ok    any completion gets a score " in out
    assert last.startswith("7 of 7 passed in ")


def test_a_plugin_that_imports_a_private_name_is_reported(rewards, capsys):
    (rewards / "nosy.py").write_text("from rlcore.trainer.run import Clock\ndef score(completion): return 1.0\n")

    code, out = check(capsys, "reward", "nosy.py:score")

    assert code == 1
    assert "FAIL  only declared names are imported" in out
    assert "private names of rlcore may change in any release: rlcore.trainer.run.Clock" in out


def test_a_failure_shows_the_requirement_of_the_contract(rewards, capsys):
    code, out = check(capsys, "reward", "r.py:fragile")

    assert code == 1
    assert "  FAIL  any completion gets a score" in out
    assert "        completion '' gets no score: ValueError: could not convert string to float: '' (r.py:" in out
    assert out.splitlines()[-1].startswith("6 of 7 passed")


def test_wrong_scores_are_shown_with_the_expected_ones(rewards, capsys):
    code, out = check(capsys, "reward", "r.py:wrong")

    assert code == 1
    assert "the scores of the examples\n        wanted [5.0]\n        got    [4.0]" in out


def test_a_plugin_that_hangs_fails_its_test_at_the_time_limit(rewards, capsys):
    code, out = check(capsys, "reward", "r.py:deaf", "--timeout", "4")

    assert code == 1
    assert "  FAIL  the examples get their scores\n        not finished within 4 s" in out


def test_a_plugin_that_ends_its_process_fails_one_test(rewards, capsys):
    code, out = check(capsys, "reward", "r.py:dead")

    assert code == 1
    assert "  FAIL  the examples get their scores\n        the process ended with exit code 7" in out


def test_the_report_lists_skipped_checks(rewards, capsys):
    code, out = check(capsys, "reward", "r.py:plain", "--skip", "separate process")

    assert code == 0
    assert "  not checked  scores: there are no examples" in out
    assert "  not checked  it works in a separate process: skipped by --skip 'separate process'" in out
    assert out.splitlines()[-1].startswith("5 of 5 passed")


@pytest.mark.parametrize(("score", "code"), [(1.0, 0), (0.0, 1)], ids=["right", "wrong"])
def test_examples_are_read_from_a_file(rewards, capsys, score, code):
    lines = [{"completion": "4", "answer": "4", "score": score}, {"completion": "5", "answer": "4", "score": 0}]
    (rewards / "e.jsonl").write_text("\n".join(map(json.dumps, lines)))

    assert check(capsys, "reward", "r.py:graded", "--examples", "e.jsonl")[0] == code


def test_examples_without_a_column_of_the_reward_are_refused(rewards, capsys):
    (rewards / "e.jsonl").write_text('{"completion": "4", "anser": "4", "score": 1}')

    with pytest.raises(
        UserError, match=r"asks for column 'answer', which every example does not have\. Did you mean 'anser'"
    ):
        main(["reward", "r.py:graded", "--examples", "e.jsonl"])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["reward", "r.py:graded"], "reads answer, so it cannot be checked without examples"),
        (["reward", "r.py:odd"], r"are not \(sample, score\) pairs"),
        (["reward", "r.py:goood"], r"no 'goood' in it\. Did you mean 'good'\?"),
        (["reward", "r.py:good", "--option", "words=3"], "has no option 'words'"),
        (["reward", "r.py:good", "--option", "words"], "expected NAME=VALUE"),
        (["reward", "r.py:good", "--examples", "no.jsonl"], r"no\.jsonl cannot be read"),
        (["reward", "r.py:good", "--timeout", "0"], "expected more than 0"),
        (["tracker", "jsonl", "--examples", "e.jsonl"], "--examples is for rewards"),
        (["rewrad", "x"], r"no contract suite for the kind 'rewrad'\. Did you mean 'reward'\?"),
        (["transfer", "inprocess"], "no contract suite for the kind 'transfer'"),
        (["tracker", "jsonnl"], r"no tracker named 'jsonnl'\. Did you mean 'jsonl'\?"),
        (["dataset", "files"], "needs a file to open\nType  --data FILE"),
    ],
)
def test_wrong_input_is_refused_with_advice(rewards, arguments, text):
    with pytest.raises(UserError, match=text):
        main(arguments)


def test_an_example_without_its_score_is_named(rewards):
    (rewards / "e.jsonl").write_text('{"completion": "4", "score": 1}\n\n{"completion": "4"}\n')

    with pytest.raises(UserError, match=r"e\.jsonl, example 2: `completion` or a numeric `score` is missing"):
        main(["reward", "r.py:good", "--examples", "e.jsonl"])


def spec(kind, name, **options):
    empty = {"examples": None, "data": "", "model": "", "device": "cpu", "tolerance": None, "skip": [], "suite": {}}
    return {**empty, "kind": kind, "name": name, "options": options}


@pytest.mark.parametrize(
    ("kind", "name", "contract"),
    [
        ("algorithm", "grpo", AlgorithmContract),
        ("backend", "local", BackendContract),
        ("dispatch", "dp", RowDispatchContract),
        ("dispatch", "dp_metrics", RowDispatchContract),
        ("dispatch", "all", DispatchContract),
        ("rollout", "hf", ModelRolloutContract),
        ("tracker", "jsonl", TrackerContract),
    ],
)
def test_a_plugin_gets_the_suite_of_its_kind(kind, name, contract):
    suite = suites.choose(spec(kind, name))

    assert suite.tests.__mro__[1] is contract
    assert getattr(suite.tests, "metrics", False) is (name == "dp_metrics")
    assert suite.title.startswith(f"{kind} {name} (rlcore 0.")


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (spec("algorithm", "grpo", epoch=2), r"--option\.epoch: no such setting\. Did you mean 'epochs'\?"),
        (
            spec("dispatch", f"{Path(__file__).with_name('modes.py')}:Scatter"),
            "does not accept a batch .* are unknown\nWrite its test with a method `call`",
        ),
        (spec("hooks", "rlcore_workbench.testing:HooksContract", x=1), "hooks have no settings"),
        (spec("rollout", "hf") | {"model": "/nowhere"}, "/nowhere"),
        (
            spec("algorithm", "grpo") | {"suite": {"keeps_all": False}},
            "--suite keeps_all: AlgorithmContract has no such",
        ),
    ],
    ids=[
        "unknown setting",
        "unknown arguments",
        "settings of hooks",
        "missing model",
        "unknown attribute",
    ],
)
def test_a_suite_that_cannot_be_built_is_refused_with_the_reason(wrong, text):
    with pytest.raises(UserError, match=text):
        suites.choose(wrong)


def test_settings_reach_the_plugin():
    suite = suites.choose(spec("algorithm", "grpo", epochs=3, kl={"coefficient": 0.5}))

    config = suite.tests().make().config
    assert (config.epochs, config.kl.coefficient) == (3, 0.5)


def test_attributes_of_the_suite_can_be_set():
    suite = suites.choose(spec("algorithm", "grpo") | {"suite": {"keeps_every_sample": False}})

    assert suite.tests.keeps_every_sample is False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "tests"),
    [
        (["algorithm", "grpo", "--option", "minibatches=2"], 15),
        (["dispatch", "dp"], 7),
        (["tracker", "jsonl"], 6),
        (["dataset", "files", "--data", "d.jsonl"], 4),
        (["backend", "local", "--skip", "gradient", "--skip", "checkpoint"], 18),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else str(value),
)
def test_built_in_plugins_pass(rewards, capsys, arguments, tests):
    (rewards / "d.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": "2+3="}\n')

    code, out = check(capsys, *arguments)

    assert code == 0, out
    assert out.splitlines()[-1].startswith(f"{tests} of {tests} passed")


def test_the_command_is_found_and_its_exit_code_is_2_for_wrong_input(rlcore):
    done = rlcore("check", "reward", "gsm8k")

    assert done.returncode == 2
    assert done.stderr.startswith("error: reward 'gsm8k' reads answer, so it cannot be checked without examples")


ENVIRONMENTS = """
import time
from rlcore import Step

EXAMPLES = {"Good": [({"prompt": "a"}, ["x", "a"], 1.0)], "Odd": [("a", 1.0)]}

class Good:
    def __init__(self, config): pass
    async def reset(self, row):
        self.row = row
        return [{"role": "user", "content": row["prompt"]}]
    async def step(self, completion):
        right = completion.text == self.row["prompt"]
        if right or completion.last:
            return Step(reward=float(right), done=True)
        return Step(messages=[{"role": "user", "content": "again"}])

class Plain(Good): pass
class Odd(Good): pass

class NoReward(Good):
    async def step(self, completion):
        return Step(messages=[{"role": "user", "content": "again"}])

class Blocks(Good):
    async def step(self, completion):
        time.sleep(0.6)
        return await super().step(completion)
"""


@pytest.fixture
def environments(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "e.py").write_text(ENVIRONMENTS)
    return tmp_path


def test_an_environment_with_its_own_examples_passes(environments, capsys):
    code, out = check(capsys, "environment", "e.py:Good")

    assert code == 0
    assert "  ok    the last turn has a reward " in out
    assert "not checked" not in out
    assert out.splitlines()[-1].startswith("9 of 9 passed in ")


@pytest.mark.parametrize(
    ("name", "more", "text"),
    [
        ("NoReward", [], "in each, has no reward; the third has completion.last: score it"),
        (
            "Blocks",
            ["--suite", "step_timeout_s=0.4", "--skip", "anything", "--skip", "last turn"],
            "a step: await slow operations",
        ),
    ],
)
def test_a_failure_of_an_environment_shows_the_requirement(environments, capsys, name, more, text):
    code, out = check(capsys, "environment", f"e.py:{name}", *more)

    assert code == 1
    assert text in out


def test_rewards_of_an_environment_are_checked_only_with_examples(environments, capsys):
    code, out = check(capsys, "environment", "e.py:Plain")
    assert code == 0
    assert "  not checked  rewards: there are no examples" in out

    (environments / "x.jsonl").write_text('{"prompt": "b", "completions": ["b"], "score": 0}')
    code, out = check(capsys, "environment", "e.py:Plain", "--examples", "x.jsonl")
    assert code == 1
    assert "the rewards of the examples\n        wanted [0.0]\n        got    [1.0]" in out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["environment", "e.py:Odd"], r"are not \(row, completions, reward\)"),
        (
            ["environment", "e.py:Plain", "--examples", "x.jsonl"],
            "example 1: `completions`, a list, or a numeric `score`",
        ),
        (["environment", "e.py:Plain", "--option", "a=1"], "has no settings"),
        (["tracker", "jsonl", "--examples", "x.jsonl"], "--examples is for rewards and environments"),
    ],
)
def test_wrong_input_for_environments_is_refused(environments, arguments, text):
    (environments / "x.jsonl").write_text('{"prompt": "b", "score": 0}')

    with pytest.raises(UserError, match=text):
        main(arguments)
