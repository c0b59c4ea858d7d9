"""Complete runs with `rollout=vllm`, started as a user would."""

import json
import os
import subprocess
import sys

import pytest

from rlcore.testing.waiting import HANG_S

pytestmark = pytest.mark.slow


def train(directory, *settings):
    """Run a training and return the metrics of each step and the printed text."""
    command = [sys.executable, "-m", "rlcore", "train", "rollout=vllm", f"run.directory={directory}", "run.name=run"]
    done = subprocess.run([*command, *settings], capture_output=True, text=True, timeout=HANG_S, env={**os.environ})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]


def mean(steps, name):
    return sum(step[name] for step in steps) / len(steps)


def test_the_quickstart_learns(tmp_path):
    steps = train(tmp_path, "preset=quickstart", "runtime=local", "trainer.steps=40", "eval.every_steps=0")
    assert steps[-1]["eval/pass_rate"] > 0.25 > 0.1 > steps[0]["eval/pass_rate"]
    assert mean(steps[1:], "actor/rollout_logprob_gap") < 1e-5
    assert all(step["time_s/weight sync"] > 0 for step in steps[1:])


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
@pytest.mark.parametrize("placement", ["colocated", "split"])
def test_runs_on_ray_give_the_same_samples_as_a_run_in_one_process(algorithm, placement, tmp_path):
    common = ["model.path=quickstart:model", "data.train=quickstart:train", "reward=sorted_digits"]
    common += [f"algorithm={algorithm}", "trainer.steps=3", "trainer.prompts_per_step=16", "optimizer.lr=1e-3"]
    common += ["sampling.samples_per_prompt=4", "sampling.max_response_tokens=8"]
    alone = train(tmp_path / "alone", *common, "runtime=local")
    ray = train(tmp_path / "ray", *common, f"placement={placement}")
    names = ["reward/mean", "response_length/mean", "actor/loss"]
    assert [[step[name] for name in names] for step in ray[1:]] == [
        [step[name] for name in names] for step in alone[1:]
    ]


def check_async(directory, *settings):
    """Train five steps with schedule=async, and check that all prompts were trained on, within the bound."""
    ahead = ("preset=quickstart", "schedule=async", "placement=split", "rollout.max_batch_size=8", *settings)
    steps = train(directory, *ahead, "trainer.steps=5", "trainer.prompts_per_step=8", "eval.every_steps=2")
    assert [step["step"] for step in steps[1:]] == [1, 2, 3, 4, 5]
    assert steps[-1]["progress/samples"] == 5 * 8 * 8
    assert all(step["schedule/staleness_max"] <= 4 for step in steps[1:])
    assert steps[1]["actor/rollout_logprob_gap"] < 1e-5


def test_weights_arrive_while_responses_are_generated(tmp_path):
    check_async(tmp_path)


def test_responses_in_one_pool_continue_after_the_update(tmp_path):
    settings = ("preset=quickstart", "schedule=async", "placement=colocated", "device_sharing=always")
    settings += ("rollout.max_batch_size=8", "trainer.steps=5", "trainer.prompts_per_step=8", "eval.every_steps=2")
    steps = train(tmp_path, *settings)
    assert [step["step"] for step in steps[1:]] == [1, 2, 3, 4, 5]
    assert steps[-1]["progress/samples"] == 5 * 8 * 8
    assert all(step["schedule/staleness_max"] <= 4 for step in steps[1:])
    assert sum(step.get("schedule/set_aside", 0) for step in steps[1:]) > 0
    assert steps[1]["actor/rollout_logprob_gap"] < 1e-5


def test_gsm8k_with_the_story_model_runs_ten_steps(story_model, each_assets, tmp_path):
    steps = train(
        tmp_path,
        "preset=gsm8k",
        f"model.path={story_model}",
        f"data.train={each_assets / 'data' / 'gsm8k' / 'train.jsonl'}",
        "data.eval=''",
        "data.overlong=drop",
        "data.max_prompt_tokens=400",
        "runtime=local",
        "trainer.steps=10",
        "trainer.prompts_per_step=4",
        "sampling.samples_per_prompt=4",
        "sampling.max_response_tokens=32",
    )
    assert [step["step"] for step in steps if step["step"] > 0] == list(range(1, 11))
    assert mean([step for step in steps if step["step"] > 0], "actor/rollout_logprob_gap") < 1e-4
