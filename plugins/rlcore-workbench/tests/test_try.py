"""`rlcore try`: rewards on a file of completions, algorithms on a small batch."""

import json

import pytest
from rlcore_workbench.options import flat_sample, parse_options
from rlcore_workbench.trial import main

from rlcore.errors import UserError

REWARDS = """
import time
from rlcore import RewardResult

def right(completion, answer): return float(completion == answer)
def told(completion): return RewardResult(len(completion) / 10, metrics={"letters": len(completion)})
def fragile(completion): return 1 / len(completion)
def slow(completion):
    time.sleep(20 if completion == "slow" else 0)
    return 1.0
def ended(completion, finish_reason, num_tokens): return float(finish_reason == "stop" and num_tokens == 2)
"""
ALGORITHMS = """
import torch
from rlcore import LossTerms
from rlcore.algorithms.grpo import GRPO

class Scalar(GRPO):
    def loss(self, out, batch): return LossTerms(terms=out.log_probs.sum())
class NotANumber(GRPO):
    def loss(self, out, batch): return LossTerms(terms=out.log_probs / (out.log_probs.detach() * 0))
class OnThePrompt(GRPO):
    def loss(self, out, batch):
        return LossTerms(terms=batch.per_row(out.log_probs), average="row-mean")
class Detached(GRPO):
    def loss(self, out, batch): return LossTerms(terms=out.log_probs.detach())
class Undeclared(GRPO):
    def loss(self, out, batch): return LossTerms(terms=out.log_probs * batch.per_token("reward"))
class Raises(GRPO):
    def loss(self, out, batch): raise RuntimeError("no such luck")
class Nothing(GRPO):
    def loss(self, out, batch): return LossTerms(terms=0 * out.log_probs)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.py").write_text(REWARDS)
    (tmp_path / "a.py").write_text(ALGORITHMS)
    return tmp_path


def samples(folder, *rows):
    (folder / "c.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return "c.jsonl"


def attempt(capsys, *arguments):
    code = main(list(map(str, arguments)))
    return code, capsys.readouterr().out


def test_completions_are_scored_in_a_table(folder, capsys):
    file = samples(folder, {"completion": "4", "answer": "4"}, {"completion": "five\nor so", "answer": "4"})

    code, out = attempt(capsys, "reward", "r.py:right", file)

    header, first, second, count, score, time = out.splitlines()
    assert code == 0
    assert header.split() == ["#", "COMPLETION", "OUTCOME", "SCORE", "MS"]
    assert first.split()[:4] == ["0", "4", "score", "1"]
    assert second.split()[:6] == ["1", "five", "or", "so", "score", "0"]
    assert count == "2 samples: 2 score"
    assert score == "score: mean 0.5, standard deviation 0.5, from 0 to 1"
    assert time.startswith("time: median ")


def test_several_rewards_have_a_column_each_and_add_up(folder, capsys):
    file = samples(folder, {"completion": "4", "answer": "4"}, {"completion": "four", "answer": "4"})

    _, out = attempt(capsys, "reward", "r.py:right,r.py:told", file)

    header, first, second, *_ = out.splitlines()
    assert header.split() == ["#", "COMPLETION", "OUTCOME", "SCORE", "RIGHT", "TOLD", "TOLD/LETTERS", "MS"]
    assert first.split()[2:7] == ["score", "1.1", "1", "0.1", "1"]  # 1 + 1/10
    assert second.split()[2:7] == ["score", "0.4", "0", "0.4", "4"]


def test_a_sample_without_a_score_is_reported_and_the_exit_code_is_1(folder, capsys):
    code, out = attempt(capsys, "reward", "r.py:fragile", samples(folder, {"completion": "a"}, {"completion": ""}))

    assert code == 1
    assert "1 score, 1 error" in out
    assert "ZeroDivisionError: division by zero (r.py:7)" in out


def test_a_reward_that_hangs_times_out_and_other_samples_are_scored(folder, capsys):
    file = samples(folder, {"completion": "a"}, {"completion": "slow"}, {"completion": "b"})

    code, out = attempt(capsys, "reward", "r.py:slow", file, "--timeout", "1", "--json")

    assert code == 1
    assert [one["status"] for one in json.loads(out)] == ["score", "timeout", "score"]


def test_samples_of_a_run_are_accepted():
    line = {"step": 3, "prompt": "1+1=", "completion": "2", "reward": 1.0, "parts": {}, "columns": {"answer": "2"}}

    assert flat_sample(line) == {"prompt": "1+1=", "completion": "2", "answer": "2"}
    assert flat_sample({"completion": "2", "answer": "2"}) == {"completion": "2", "answer": "2"}


def test_stand_ins_for_missing_columns_are_reported(folder, capsys):
    _, out = attempt(capsys, "reward", "r.py:ended", samples(folder, {"completion": "two words"}))

    assert "ended reads finish_reason, which the file lacks: every completion counts as finished ('stop')" in out
    assert "ended reads num_tokens, which the file lacks: words are counted instead of tokens" in out
    assert "score: mean 1," in out


@pytest.mark.parametrize(
    ("rows", "arguments", "text"),
    [
        ([{"completion": "4", "anwser": "4"}], ["r.py:right"], r"c\.jsonl does not have\. Did you mean 'anwser'\?"),
        ([{"text": "4"}], ["r.py:told"], r"c\.jsonl, sample 0: no text under `completion`"),
        ([[1]], ["r.py:told"], r"c\.jsonl:1: a list, not an object"),
        ([], ["r.py:told"], r"c\.jsonl has no rows"),
        ([{"completion": "4"}], ["r.py:told", "--timeout", "0"], "expected more than 0"),
        ([{"completion": "4"}], ["r.py:told", "--option", "max=2"], "reward 'told' has no option 'max'"),
        (
            [{"completion": "4"}],
            ["r.py:told,length", "--option", "max=2"],
            "--option max: does not name one of the rewards",
        ),
    ],
    ids=["column", "completion", "not an object", "empty", "timeout", "unknown option", "ambiguous option"],
)
def test_wrong_input_is_refused_with_advice(folder, rows, arguments, text):
    name, *more = arguments
    with pytest.raises(UserError, match=text):
        main(["reward", name, samples(folder, *rows), *more])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["rollout", "hf"], "rlcore check rollout NAME"),
        (["reward", "r.py:told"], "no completions to score"),
        (["reward", "r.py:told", "no.jsonl"], r"no\.jsonl cannot be read"),
        (["algorithm", "gropo"], "Did you mean 'grpo'"),
        (["algorithm", "grpo", "no_batch"], "no_batch is not a recorded batch"),
    ],
)
def test_a_wrong_command_is_refused_with_advice(arguments, text):
    with pytest.raises(UserError, match=text):
        main(arguments)


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_algorithms_of_the_core_are_valid(capsys, name):
    code, out = attempt(capsys, "algorithm", name, "--option", "minibatches=2", "--json")

    report = json.loads(out)
    assert code == 0
    assert {"grpo": ["actor"], "ppo": ["actor", "critic"]}[name] == list(report["losses"])
    for facts in report["losses"].values():
        assert (facts["wrong"], facts["terms"], facts["gradient_outside_loss_mask"]) == ([], [90], 0.0)
        assert facts["gradient_norm"] > 0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Scalar", "the loss raised ValueError: average=token-mean needs one term per token"),
        ("NotANumber", "terms are not finite"),
        ("OnThePrompt", "prompt tokens have a gradient"),
        ("Detached", "the loss has no gradient: are its terms detached?"),
        ("Undeclared", "no column 'reward'. Columns: "),
        ("Raises", "the loss raised RuntimeError: no such luck"),
        ("Nothing", "the gradient is zero everywhere"),
    ],
)
def test_a_fault_of_a_loss_is_reported(capsys, name, text):
    code, out = attempt(capsys, "algorithm", f"a.py:{name}")

    assert code == 1
    assert text in out
    assert "valid:" not in out


def test_a_saved_batch_gives_the_same_loss(folder, capsys):
    _, made = attempt(capsys, "algorithm", "grpo", "--option", "minibatches=2", "--save", "my_batch", "--json")
    _, read = attempt(capsys, "algorithm", "grpo", "my_batch", "--option", "minibatches=2", "--json")

    assert json.loads(read)["losses"] == json.loads(made)["losses"]


def test_a_batch_without_a_column_of_the_loss_is_reported(folder, capsys):
    attempt(capsys, "algorithm", "grpo", "--save", "my_batch")

    code, out = attempt(capsys, "algorithm", "grpo", "my_batch", "--option", "kl.coefficient=0.1")

    assert code == 1
    assert "reads() names ref_log_probs, but the batch has no such column" in out


def test_options_are_json_and_may_be_nested():
    found = parse_options(["a.b=0.5", "a.c=true", "name=x y", "list=[1,2]", "none=null"])

    assert found == {"a": {"b": 0.5, "c": True}, "name": "x y", "list": [1, 2], "none": None}


@pytest.mark.parametrize(
    ("texts", "words"),
    [(["a"], "NAME=VALUE"), (["a=1", "a=2"], "given twice"), (["a=1", "a.b=2"], "already has a value")],
)
def test_options_that_cannot_be_read_are_refused(texts, words):
    with pytest.raises(UserError, match=words):
        parse_options(texts)
