"""Environments in whole runs: failures are logged, counted, and handled according to `reward.on_error`."""

from __future__ import annotations

import json
import re
import shutil

import pytest
from rlcore_tests.runs import metrics
from rlcore_tests.window import NO_STEPS_AHEAD, without_schedule

from rlcore.cli import main
from rlcore.data.recorded import open_batch
from rlcore.quickstart import Recipe, prepare

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
ENVIRONMENTS = """
import asyncio
import time
from dataclasses import dataclass

from rlcore import Step, hookimpl


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    turns: int = 2


class Good:
    Config = Settings

    def __init__(self, config):
        self.turns = config.turns

    async def reset(self, row):
        self.bad = row["prompt_id"] % 2 == 1
        return [{"role": "user", "content": row["prompt"]}]

    async def step(self, completion):
        if completion.turn + 1 == self.turns:
            return Step(reward=float(len(completion.text)), done=True)
        return Step(messages=[{"role": "user", "content": "and"}])


class Raises(Good):
    async def step(self, completion):
        if self.bad:
            raise KeyError("door")
        return await super().step(completion)


class Hangs(Good):
    async def step(self, completion):
        if self.bad:
            await asyncio.sleep(1000)
        return await super().step(completion)


class Blocks(Good):
    async def step(self, completion):
        if self.bad and completion.turn == 1:
            time.sleep(30)
        return await super().step(completion)


class Never(Good):
    async def step(self, completion):
        return Step(messages=[{"role": "user", "content": "again"}])


class Needs(Good):
    def __init__(self):
        pass


def untyped(word):
    "Say a word."


class Tool(Good):
    tools = (untyped,)


class NoStep:
    async def reset(self, row):
        return []


class Fails:
    @hookimpl
    def rlcore_samples_scored(self, run, step, samples):
        if step == 2:
            raise RuntimeError("the second step has no rewards")


def about(completion, episode_messages, num_turns, digits):
    assert [m["role"] for m in episode_messages][::2] == ["user"] * num_turns
    return float(num_turns)
"""


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    recipe = Recipe(digits=3, warm_steps=20, warm_batch=32, train_prompts=64, eval_prompts=8)
    return prepare(tmp_path_factory.mktemp("assets"), recipe)


@pytest.fixture(scope="module")
def chat_model(assets, tmp_path_factory):
    """Copy the quickstart model and add a chat template."""
    directory = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(assets.model, directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


@pytest.fixture
def train(assets, chat_model, tmp_path, capsys, monkeypatch):
    """Return a function that trains; it returns the exit code, stderr and the metrics of the last step."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "e.py").write_text(ENVIRONMENTS)

    def run(*more, steps=1):
        settings = {
            "model.path": str(chat_model),
            "data.train": str(assets.train),
            "runtime": "local",
            "trackers": "jsonl",
            "run.name": "r",
            "data.shuffle": "false",
            "trainer.steps": str(steps),
            "trainer.prompts_per_step": "4",
            "sampling.samples_per_prompt": "2",
            "sampling.max_response_tokens": "6",
            "episode.step_timeout_s": "5",
            "reward.num_processes": "0",
        } | dict(item.split("=", 1) for item in more)
        code = main(["train", *(f"{name}={value}" for name, value in settings.items())])
        metrics = tmp_path / "outputs" / "r" / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.is_file() else []
        return code, capsys.readouterr().err, json.loads(lines[-1]) if lines else {}

    return run


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_run_with_an_environment_needs_no_other_setting(train, algorithm):
    code, stderr, metrics = train("environment=e.py:Good", f"algorithm={algorithm}", "algorithm.minibatches=2", steps=2)

    assert code == 0, stderr
    assert metrics["environment/turns"] == 2.0
    assert metrics["reward/mean"] == metrics["reward/environment"]
    assert metrics["actor/rollout_logprob_gap"] < 1e-3
    assert metrics["reward/num_score"] == 8.0


def test_episodes_that_were_generated_ahead_survive_an_error(train, tmp_path):
    pipelined = ["environment=e.py:Good", "schedule=pipelined", "placement=split"]
    code, stderr, whole = train(*pipelined, steps=3)
    assert code == 0, stderr
    (tmp_path / "outputs" / "r").rename(tmp_path / "whole")

    with pytest.raises(RuntimeError, match="the second step has no rewards"):
        train(*pipelined, "plugins.hooks=['e.py:Fails']", steps=3)
    (queue,) = (tmp_path / "outputs" / "r" / "checkpoints").glob("step_000001/queue")
    assert open_batch(queue)["group_id"].unique().tolist() == [4, 5, 6, 7]
    assert [message["role"] for message in open_batch(queue)["episode_messages"][0]][::2] == ["user", "user"]
    code, stderr, resumed = train(*pipelined, steps=3)

    assert code == 0, stderr
    assert whole["schedule/staleness_mean"] == 1.0
    names = ("actor/loss", "actor/grad_norm", "reward/mean", "environment/turns", "response_length/mean")
    assert [resumed[name] for name in names] == [whole[name] for name in names]


def test_without_steps_ahead_the_window_gives_the_episodes_of_sync(train, tmp_path):
    found = []
    for more in ([], [NO_STEPS_AHEAD]):
        settings = ("environment=e.py:Good", "environment.turns=3", "placement=split", *more)
        code, stderr, _ = train(*settings, f"run.directory={tmp_path / str(len(found))}", steps=3)
        assert code == 0, stderr
        found.append(metrics(tmp_path / str(len(found))))

    sync, window = found
    for line in (*sync, *window):  # the engine's log-probs depend on which requests arrive together
        assert line.pop("actor/policy_gap", 0) + line.pop("actor/rollout_logprob_gap", 0) < 1e-5
    assert without_schedule(window) == sync
    assert (sync[-1]["environment/turns"], window[-1]["schedule/staleness_max"]) == (3, 0)
    assert sync[-1]["actor/grad_norm"] > 0


@pytest.mark.parametrize("runtime", ["local", "ray"])
def test_episodes_of_an_asynchronous_run_go_on_under_new_weights(train, runtime, tmp_path):
    ahead = ("schedule=async", "placement=split", f"runtime={runtime}", "trainer.log_samples=1000")
    code, stderr, metrics = train("environment=e.py:Good", "environment.turns=4", *ahead, steps=4)

    assert code == 0, stderr
    assert metrics["environment/turns"] == 4.0
    assert metrics["progress/samples"] == 4 * 8
    lines = [json.loads(line) for line in (tmp_path / "outputs" / "r" / "samples.jsonl").read_text().splitlines()]
    assert sorted(line["sample_id"] for line in lines) == [*range(4 * 8)]
    assert 0 < metrics["schedule/staleness_mean"] <= metrics["schedule/staleness_max"] <= 4


def test_episodes_that_fail_ahead_of_others_are_counted_in_the_step_that_takes_them(train, caplog):
    more = ("schedule=async", "placement=split", "reward.on_error=drop", "sampling.samples_per_prompt=1")
    code, stderr, metrics = train("environment=e.py:Raises", *more, steps=2)

    assert code == 0, stderr
    failed = sum(int(number) for number in re.findall(r"(\d) of 4 samples have no reward", caplog.text))
    assert failed == 4, "of eight episodes, every second one fails"
    assert metrics["reward/num_error"] + metrics["reward/num_score"] == 4.0


def test_other_rewards_see_the_conversation_and_are_summed(train):
    code, stderr, metrics = train("environment=e.py:Good", "environment.turns=3", "reward=[e.py:about,environment]")

    assert code == 0, stderr
    assert metrics["reward/about"] == 3.0
    assert metrics["reward/mean"] == pytest.approx(3.0 + metrics["reward/environment"], abs=1e-4)


def test_evaluation_and_samples_show_the_conversation(train, assets, tmp_path, capsys):
    code, stderr, _ = train("environment=e.py:Good", f"data.eval={assets.eval}")
    assert code == 0, stderr
    sample = json.loads((tmp_path / "outputs" / "r" / "samples.jsonl").read_text().splitlines()[0])
    assert [m["role"] for m in sample["columns"]["episode_messages"]] == ["user", "assistant", "user", "assistant"]

    assert main(["eval", "outputs/r", "runtime=local", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["eval/samples"] == 8.0


FAULTS = [
    ("Raises", "num_error", "environment 'Raises' in turn 1 of prompt 1: KeyError: 'door' (e.py:"),
    ("Hangs", "num_timeout", "environment 'Hangs' in turn 1 of prompt 1: no answer within 5 s"),
    ("Blocks", "num_timeout", "environment 'Blocks' in turn 2 of prompt 1: it blocks at e.py:"),
]


# One value of on_error is enough for the slow fault.
CASES = [(on_error, *fault) for fault in FAULTS for on_error in ("raise", "drop", "zero") if fault[0] != "Blocks"]
CASES += [("drop", *FAULTS[-1])]


@pytest.mark.parametrize(
    ("on_error", "name", "metric", "text"), CASES, ids=[f"{name}-{on_error}" for on_error, name, _, _ in CASES]
)
def test_a_failing_episode_is_logged_and_counted(train, caplog, name, metric, text, on_error):
    code, stderr, metrics = train(
        f"environment=e.py:{name}", f"reward.on_error={on_error}", "sampling.samples_per_prompt=1"
    )

    if on_error == "raise":
        assert code == 1
        assert text in stderr
        return
    assert code == 0, stderr
    assert text in caplog.text
    assert metrics[f"reward/{metric}"] == 2.0
    assert metrics["reward/num_score"] == 2.0


def test_an_episode_that_never_ends_fails_the_run_with_a_fix_in_the_message(train):
    code, stderr, _ = train("environment=e.py:Never", "episode.max_turns=3")

    assert code == 1
    assert "environment 'Never' in turn 3 of prompt 0: no reward before the limit of episode.max_turns=3" in stderr
    assert "episode.cut_reward=0" in stderr


def test_truncated_episodes_are_counted_and_logged(train, caplog):
    code, stderr, metrics = train("environment=e.py:Never", "episode.max_turns=2", "episode.cut_reward=0")

    assert code == 0, stderr
    assert metrics["environment/num_out_of_turns"] == 8.0
    assert metrics["response_length/truncated"] == 1.0
    assert "8 of 8 episodes reached episode.max_turns, first for prompt 0" in caplog.text


REFUSED = [
    (["environment=calculater"], "no environment named 'calculater'."),
    (["environment=e.py:NoStep"], "environment 'NoStep' does not meet the Environment protocol: no method step"),
    (["environment=e.py:Needs"], "environment 'e.py:Needs' cannot be created: TypeError"),
    (["environment=e.py:Tool"], "tool 'untyped' has no schema"),
    (["environment=e.py:Good", "environment.turn=3"], "environment.turn: no such setting. Did you mean 'turns'?"),
    (
        ["environment=e.py:Good", "episode.max_turns=0"],
        "episode.max_turns: expected 1 or more, got 0\nType  episode.max_turns=8",
    ),
    (["environment=e.py:Good", "episode.step_timeout_s=0"], "episode.step_timeout_s: expected more than 0"),
    (["reward=environment"], "reward 'environment' asks for column 'episode_reward', which "),
    (["environment=e.py:Good", "reward=exact_match"], "reward 'exact_match' asks for column 'answer', which "),
    (["environment=e.py:Good", "data.system=Be brief"], "data.system: an environment writes its own messages\nRemove"),
    (["environment=e.py:Good", "model.path={plain}"], "its tokenizer has no chat template, which environments need"),
]


@pytest.mark.parametrize(("more", "text"), REFUSED, ids=[text[:40] for _, text in REFUSED])
def test_settings_that_cannot_work_are_refused_before_the_start(train, assets, more, text):
    code, stderr, metrics = train(*(item.format(plain=assets.model) for item in more))

    assert (code, metrics) == (2, {})
    assert text in stderr
    assert "Traceback" not in stderr


def test_an_algorithm_that_generates_nothing_refuses_an_environment(train):
    pytest.importorskip("rlcore_algorithms")
    code, stderr, _ = train("environment=e.py:Good", "algorithm=sft", "algorithm.column=digits")

    assert code == 2
    assert "generates nothing\nRemove  environment" in stderr or "no such setting" in stderr


def test_two_rewards_with_the_same_name_get_distinct_metrics(train):
    code, stderr, metrics = train("environment=e.py:Good", "reward=[environment,{name: environment, weight: 2.0}]")

    assert code == 0, stderr
    assert metrics["reward/environment"] == metrics["reward/environment#2"]
    assert metrics["reward/mean"] == pytest.approx(3 * metrics["reward/environment"], abs=1e-4)


def test_a_run_with_an_environment_works_in_ray_processes(train, tmp_path):
    code, stderr, metrics = train("environment=e.py:Good", "runtime=ray", "reward.num_processes=1")

    assert code == 0, stderr
    assert metrics["environment/turns"] == 2.0
