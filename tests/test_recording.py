"""Recorded steps: the same training without an engine, and samples without training."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from rlcore_tests.runs import metrics, small_run

import rlcore
from rlcore.algorithms.grpo import GRPO
from rlcore.cli import main
from rlcore.cli.train import plan_run
from rlcore.cli.train import run as train
from rlcore.data.loader import PromptLoader
from rlcore.data.recorded import open_batch, save_batch
from rlcore.errors import ConfigError, DataError, RunError
from rlcore.quickstart import locate
from rlcore.trainer.launch import launch
from rlcore.trainer.loop import step

OWN = f"{Path(__file__)}:"
PIPELINED = ("schedule=pipelined", "placement=split")


class TwoRounds(GRPO):
    """Asks for more prompts in every step, like DAPO."""

    def collect(self, roles, prompts):
        first = super().collect(roles, prompts)
        return type(first).cat([first, super().collect(roles, roles.more_prompts(2))])


class TwiceTheSame(GRPO):
    """Generates twice for the same prompts."""

    def collect(self, roles, prompts):
        roles.generate(prompts)
        return super().collect(roles, prompts)


class OwnPrompts(GRPO):
    """Generates for prompts that the loader did not issue."""

    def collect(self, roles, prompts):
        return super().collect(roles, prompts.with_rows(group_id=prompts["group_id"] + 1000))


class Direct(GRPO):
    """Calls the engine itself."""

    def collect(self, roles, prompts):
        roles.rollout.generate(prompts, roles.sampling, 1)
        return super().collect(roles, prompts)


class Interrupt:
    """Presses ctrl-C in step 2."""

    @rlcore.hookimpl
    def rlcore_step_end(self, step):
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)


def learning(directory: Path) -> list[dict[str, float]]:
    """Return the metrics of learning in each step."""
    other = ("eval/", "schedule/", "rollout")
    rows = [{name: it for name, it in row.items() if not name.startswith(other)} for row in metrics(directory)]
    return [row for row in rows if row["step"]]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    """Return a run of four steps with its recording."""
    directory = tmp_path_factory.mktemp("recorded")
    train(small_run(directory, "schedule.record=true"), dry_run=False)
    return directory / "r"


def replay(recording: Path, directory: Path, *more: str, **settings: int) -> list[dict[str, float]]:
    train(small_run(directory, f"schedule.replay={recording}", *more, **settings), dry_run=False)
    return learning(directory)


def test_recording_changes_nothing_and_replay_repeats_it_bit_for_bit(recorded, tmp_path):
    train(small_run(tmp_path / "plain"), dry_run=False)

    assert learning(tmp_path / "plain") == learning(recorded.parent)
    assert replay(recorded, tmp_path / "again") == learning(recorded.parent)


@pytest.mark.parametrize("algorithm", ["grpo", f"{OWN}TwoRounds"])
def test_a_pipelined_run_is_repeated_without_its_schedule(algorithm, tmp_path):
    settings = (f"algorithm={algorithm}", "algorithm.minibatches=2")
    train(small_run(tmp_path / "ahead", *settings, *PIPELINED, "schedule.record=true"), dry_run=False)

    found = replay(tmp_path / "ahead" / "r", tmp_path / "again", *settings)

    assert found == learning(tmp_path / "ahead")
    assert len(found) == 4


def test_an_asynchronous_run_on_ray_is_repeated_bit_for_bit(tmp_path):
    """Timing decides which weights generate a token, so this cannot be repeated without a recording."""
    ahead = ("schedule=async", "placement=split", "rollout.max_batch_size=12", "runtime=ray")
    train(small_run(tmp_path / "ahead", *ahead, "schedule.record=true", steps=5), dry_run=False)

    found = replay(tmp_path / "ahead" / "r", tmp_path / "again", steps=5)

    assert found == learning(tmp_path / "ahead")
    assert max(line["schedule/staleness_max"] for line in metrics(tmp_path / "ahead")[1:]) > 0


def test_a_replay_on_ray_starts_no_engine_and_is_the_same(recorded, tmp_path):
    found = replay(recorded, tmp_path, "runtime=ray", "placement=split", "pools.rollout.devices_per_node=64")

    assert found == learning(recorded.parent)


def test_a_replay_resumes(recorded, tmp_path):
    whole = replay(recorded, tmp_path, "checkpoint.every_steps=2")
    shutil.rmtree(tmp_path / "r" / "checkpoints" / "step_000004")

    assert replay(recorded, tmp_path, "checkpoint.every_steps=2") == whole == learning(recorded.parent)


def test_another_loss_learns_something_else_from_the_same_samples(recorded, tmp_path):
    found, before = replay(recorded, tmp_path, "algorithm.clip_high=0.01"), learning(recorded.parent)

    assert [row["reward/mean"] for row in found] == [row["reward/mean"] for row in before]
    assert found[0]["actor/clip_fraction"] != before[0]["actor/clip_fraction"]


def test_a_recorded_step_has_samples_scores_and_columns_of_the_data(recorded):
    samples = open_batch(recorded / "steps" / "000002")

    assert len(samples) == 8 * 4
    assert torch.equal(samples["reward"], samples["reward:sorted_digits"])
    assert {"input_ids", "loss_mask", "rollout_log_probs", "prompt", "completion", "finish_reason"} <= {
        *samples.columns
    }
    assert set(samples["policy_version"].tolist()) == {1}


def test_a_replay_has_no_engine_and_no_evaluation(recorded, tmp_path, caplog):
    plan, hooks = plan_run(small_run(tmp_path, f"schedule.replay={recorded}", "eval.every_steps=1"))
    run = launch(plan, hooks)
    try:
        found = step(run, run.next_step())
    finally:
        run.close({})

    assert sorted(run.roles.groups) == ["actor", "reward"]
    assert not any(name.startswith("eval/") for name in found)
    assert "time_s/weight sync" not in found
    assert "this run has no evaluation" in caplog.text


def test_prompts_that_are_not_used_are_reported(recorded, tmp_path, caplog):
    replay(recorded, tmp_path, "trainer.prompts_per_step=6", steps=2)

    assert caplog.text.count("step 1 used 6 of its 8 recorded prompts") == 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["trainer.steps=6"], r"has no step 5, and trainer.steps=6\nType  trainer.steps=4"),
        (["run.seed=1"], r"the recording in .*r was made with run.seed=0, not 1\nType run.seed=0, or record again"),
        (["sampling.samples_per_prompt=2"], r"was made with sampling.samples_per_prompt=4, not 2"),
        (["data.shuffle=false"], r"the recording in .*r was made with data.shuffle=True, not False"),
        (["trainer.prompts_per_step=9"], r"has 8 prompts in step 1, .*\nType  trainer.prompts_per_step=8"),
        (["schedule.record=true"], r"schedule.record: expected false with schedule.replay"),
        (["schedule.replay=/nowhere"], r"is not a recording: .*\nRecord one:  rlcore train … schedule.record=true"),
    ],
)
def test_a_replay_that_does_not_fit_is_refused_before_the_start(settings, words, recorded, tmp_path):
    with pytest.raises(ConfigError, match=words):
        plan_run(small_run(tmp_path, f"schedule.replay={recorded}", *settings))


def test_other_data_is_refused(tmp_path):
    file, settings = tmp_path / "train.jsonl", [f"data.train={tmp_path / 'train.jsonl'}", "data.eval="]
    rows = [{"prompt": f"sort {number}=", "digits": str(number), "hint": "none"} for number in range(52310, 52320)]
    file.write_text("\n".join(map(json.dumps, rows)))
    train(small_run(tmp_path, *settings, "schedule.record=true", steps=1), dry_run=False)
    settings = small_run(tmp_path / "again", *settings, f"schedule.replay={tmp_path / 'r'}", steps=1)

    file.write_text("\n".join(map(json.dumps, [*rows[:9], rows[9] | {"hint": "first 1"}])))
    with pytest.raises(ConfigError, match=r"the data differs from that of the recording in .* in the column hint\n"):
        plan_run(settings)
    file.write_text("\n".join(map(json.dumps, rows[::-1])))
    with pytest.raises(ConfigError, match=r"the prompts differ from those of the recording in .*\nGive the dataset"):
        plan_run(settings)


def test_another_tokenizer_is_refused(recorded, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(locate("quickstart:model"), model)
    vocabulary = json.loads((model / "tokenizer.json").read_text())
    ids = vocabulary["model"]["vocab"]
    ids["1"], ids["2"] = ids["2"], ids["1"]
    (model / "tokenizer.json").write_text(json.dumps(vocabulary))

    with pytest.raises(
        ConfigError, match=r"the prompts differ from those of the recording in .*\nGive the dataset, the tok"
    ):
        plan_run(small_run(tmp_path, f"schedule.replay={recorded}", f"model.path={model}"))


def test_a_missing_or_damaged_step_is_named(recorded, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(recorded, copy)
    third = open_batch(copy / "steps" / "000003")
    save_batch(third.with_rows(prompt_id=third["prompt_id"] + 1), tmp_path / "other")
    for name in ("000002", "000003"):
        shutil.rmtree(copy / "steps" / name)
    with pytest.raises(ConfigError, match=r"has no step 2, and trainer.steps=4\nType  trainer.steps=1"):
        plan_run(small_run(tmp_path, f"schedule.replay={copy}"))

    (tmp_path / "other").rename(copy / "steps" / "000002")
    with pytest.raises(DataError, match="000002 does not hold the prompts of the data\nRecord it again"):
        replay(copy, tmp_path, steps=2)


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        ("TwoRounds", r"step 1 needs more prompts than the 8 that .*steps has for it\nUse the settings"),
        ("OwnPrompts", "step 1: the algorithm generates for prompts that were not recorded\nTrain with an engine"),
        ("Direct", "the algorithm generates with roles.rollout itself, and schedule.replay starts no engine"),
    ],
)
def test_an_algorithm_that_needs_other_samples_is_refused(algorithm, words, recorded, tmp_path):
    with pytest.raises(ConfigError, match=words):
        replay(recorded, tmp_path, f"algorithm={OWN}{algorithm}")


def test_generating_twice_for_a_prompt_cannot_be_recorded(tmp_path):
    with pytest.raises(RunError, match=r"step 1: the algorithm called roles.generate twice with one prompt"):
        train(small_run(tmp_path, f"algorithm={OWN}TwiceTheSame", "schedule.record=true"), dry_run=False)


def test_a_resumed_recording_replaces_steps_after_its_checkpoint(recorded, tmp_path, caplog):
    settings = ("schedule.record=true", "checkpoint.every_steps=2")
    train(small_run(tmp_path, *settings), dry_run=False)
    steps, checkpoints = tmp_path / "r" / "steps", tmp_path / "r" / "checkpoints"
    shutil.rmtree(checkpoints / "step_000004")
    shutil.rmtree(steps / "000003")
    save_batch(open_batch(steps / "000002").take(range(4)), steps / "000003")

    train(small_run(tmp_path, *settings), dry_run=False)

    assert replay(tmp_path / "r", tmp_path / "again") == learning(recorded.parent)
    train(small_run(tmp_path, *settings, "run.resume=never", steps=1), dry_run=False)
    assert sorted(os.listdir(steps)) == ["000001", "recording.json"]
    assert (tmp_path / "r" / "steps.1" / "000004").is_dir()
    assert "the recorded steps of an earlier run are now in" in caplog.text


def test_positions_that_a_replay_passes_over_are_issued_later():
    loader = PromptLoader(10, 0)

    loader.issue_at([3, 1])
    loader.issue_at([2])

    assert [item.position for item in loader.issue(3)] == [0, 4, 5]
    loader.finish([1, 2, 3])
    loader.consume([1, 2, 3])
    assert loader.outstanding == [0, 4, 5]


def rollout(directory: Path, *more: str) -> int:
    settings = [item for item in small_run(directory, *more) if not item.startswith("run.")]
    settings = [item for item in settings if not item.startswith("trainer.steps") or item in more]
    return main(["rollout", locate("quickstart:model"), str(directory / "samples"), *settings])


def test_rollout_generates_what_a_run_would_and_a_run_trains_on_it(recorded, tmp_path, capsys):
    assert rollout(tmp_path, "trainer.steps=4") == 0

    out = capsys.readouterr().out
    assert "32 prompts × 4 in 4 steps" in out
    assert f"128 in 4 steps: {tmp_path}/samples/steps" in out
    first = [open_batch(it / "steps" / "000001") for it in (recorded, tmp_path / "samples")]
    for name in ("input_ids", "rollout_log_probs", "reward"):
        torch.testing.assert_close(first[0][name], first[1][name], rtol=0, atol=0)
    found = replay(tmp_path / "samples", tmp_path)
    assert found[0] == learning(recorded.parent)[0]
    assert len(found) == 4


def test_rollout_covers_the_data_and_says_what_repeats(tmp_path, capsys):
    rows = (Path(locate("quickstart:train"))).read_text().splitlines()[:20]
    (tmp_path / "train.jsonl").write_text("\n".join(rows))

    assert rollout(tmp_path, f"data.train={tmp_path / 'train.jsonl'}", "trackers=[]") == 0

    assert "24 prompts, 4 of them again to fill the last step × 4 in 3 steps" in capsys.readouterr().out
    seen = [int(it) for i in (1, 2, 3) for it in open_batch(tmp_path / f"samples/steps/00000{i}")["prompt_id"]]
    assert set(seen) == set(range(20))


def test_rollout_continues_where_it_was_interrupted(tmp_path, capsys):
    whole = tmp_path / "whole"
    assert rollout(whole, "trainer.steps=3") == 0

    assert rollout(tmp_path, "trainer.steps=3", f"plugins.hooks=[{__name__}:Interrupt]") == 130
    assert len(os.listdir(tmp_path / "samples" / "steps")) == 3
    assert rollout(tmp_path, "trainer.steps=3") == 0

    for number in (1, 2, 3):
        both = [open_batch(it / "samples" / "steps" / f"{number:06d}") for it in (whole, tmp_path)]
        assert torch.equal(both[0]["input_ids"], both[1]["input_ids"])
    capsys.readouterr()
    assert rollout(tmp_path, "trainer.steps=3") == 0
    assert "96 in 3 steps" in capsys.readouterr().out


def test_rollout_counts_samples_without_a_reward(tmp_path, capsys):
    reward = tmp_path / "rewards.py"
    reward.write_text("def odd(completion, sample_id):\n    return 1.0 if sample_id % 4 else None\n")

    assert rollout(tmp_path, "trainer.steps=2", f"reward={reward}:odd") == 0

    assert "no reward  16 skipped, 0 timed out, 0 failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("make", "settings", "words"),
    [
        ("run", [], "is a training run\nType another directory"),
        ("samples", ["sampling.temperature=0.5"], "has samples with sampling.temperature=1.0, not 0.5"),
        ("samples", ["trainer.prompts_per_step=4"], "has samples with trainer.prompts_per_step=8, not 4"),
        ("files", [], "is not empty, and holds no samples"),
    ],
)
def test_rollout_does_not_write_to_a_directory_with_something_else(make, settings, words, tmp_path, capsys):
    if make == "run":
        train(small_run(tmp_path, "run.name=samples", steps=1), dry_run=False)
    elif make == "samples":
        assert rollout(tmp_path, "trainer.steps=1") == 0
    else:
        (tmp_path / "samples").mkdir()
        (tmp_path / "samples" / "notes.txt").write_text("mine")

    assert rollout(tmp_path, "trainer.steps=2", *settings) == 2

    assert words in capsys.readouterr().err
