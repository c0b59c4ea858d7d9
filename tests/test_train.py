"""Complete runs: they learn, give the same results on both runtimes, and resume exactly."""

import json
import os
import re
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from rlcore_tests.runs import metrics, small_run

from rlcore.cli.train import run as train
from rlcore.errors import ConfigError, RunError
from rlcore.testing.waiting import HANG_S, wait_until

FAULTS = Path(__file__).with_name("faults.py")


@pytest.fixture(scope="module", autouse=True)
def _quickstart_assets(tmp_path_factory):
    """Create the quickstart assets once, in the user's cache."""
    os.environ.setdefault("RLCORE_CACHE", str(Path.home() / ".cache" / "rlcore"))


def command(*arguments: str, mark: str = "", **env: str) -> subprocess.Popen:
    own = {**os.environ, **env, "RLCORE_TEST_MARK": mark}
    return subprocess.Popen(
        [sys.executable, "-m", "rlcore", "train", *arguments],
        env=own,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def marked(mark: str) -> list[int]:
    """Return the processes with this mark in their environment variables."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"RLCORE_TEST_MARK={mark}".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except (FileNotFoundError, PermissionError, ProcessLookupError):
                continue
    return found


def test_samples_of_several_prompts_are_logged(tmp_path):
    train(small_run(tmp_path, "trainer.log_samples=3", steps=2), dry_run=False)

    (path,) = tmp_path.rglob("samples.jsonl")
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    assert [len({one["prompt_id"] for one in samples if one["step"] == step}) for step in (1, 2)] == [3, 3]


def test_the_quickstart_learns_in_forty_steps(tmp_path):
    train(small_run(tmp_path, "trainer.prompts_per_step=64", "sampling.samples_per_prompt=8", steps=40), dry_run=False)
    rewards = [line["reward/mean"] for line in metrics(tmp_path)[1:]]
    assert rewards[0] < 0.15
    assert sum(rewards[-5:]) / 5 > 2 * rewards[0]


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_ray_and_local_give_bitwise_equal_results(tmp_path, algorithm):
    more = [] if algorithm == "grpo" else ["algorithm=ppo", "algorithm.kl.coefficient=0.1"]
    train(small_run(tmp_path / "local", *more), dry_run=False)
    train(small_run(tmp_path / "ray", *more, "runtime=ray"), dry_run=False)
    assert metrics(tmp_path / "local") == metrics(tmp_path / "ray")


def test_an_algorithm_in_a_file_gets_its_own_settings_on_the_hosts(tmp_path):
    code = """
from dataclasses import dataclass
from rlcore.algorithms.grpo import GRPO, GRPOConfig

@dataclass(frozen=True, slots=True, kw_only=True)
class MineConfig(GRPOConfig):
    boost: float = 1.0

class Mine(GRPO):
    Config = MineConfig

    def loss(self, out, batch):
        terms = super().loss(out, batch)
        terms.metrics["boost"] = 0 * out.log_probs.detach() + self.config.boost
        return terms
"""
    (tmp_path / "my.algorithm.py").write_text(code)
    mine = [f"algorithm={tmp_path}/my.algorithm.py:Mine", "algorithm.boost=2.5"]
    train(small_run(tmp_path, *mine, "runtime=ray", steps=1), dry_run=False)
    assert metrics(tmp_path)[1]["actor/boost"] == 2.5


def test_split_pools_give_the_same_results_as_one_pool(tmp_path):
    train(small_run(tmp_path / "one"), dry_run=False)
    train(small_run(tmp_path / "two", "runtime=ray", "placement=split"), dry_run=False)
    assert metrics(tmp_path / "one") == metrics(tmp_path / "two")


def test_two_data_parallel_ranks_train_like_one(tmp_path):
    odd = ["trainer.prompts_per_step=7", "sampling.samples_per_prompt=3"]  # 21 rows do not divide
    train(small_run(tmp_path / "one", *odd), dry_run=False)
    train(small_run(tmp_path / "two", *odd, "runtime=ray", "pools.main.devices_per_node=2"), dry_run=False)
    for one, two in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        assert one == pytest.approx(two, rel=1e-4, abs=1e-6)


def test_a_resumed_run_is_bitwise_equal_to_an_uninterrupted_one(tmp_path):
    every = "checkpoint.every_steps=3"
    train(small_run(tmp_path / "whole", every, steps=7), dry_run=False)
    with pytest.raises(RuntimeError, match="fourth step"):
        train(small_run(tmp_path / "cut", every, f"plugins.hooks=['{FAULTS}:raises']", steps=7), dry_run=False)
    train(small_run(tmp_path / "cut", every, steps=7), dry_run=False)
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "cut")


@pytest.mark.parametrize("background", [True, False])
def test_training_continues_while_a_checkpoint_is_written(tmp_path, background):
    later = [
        f"backend={FAULTS}:WritesLater",
        "algorithm.minibatches=1",
        "algorithm.skip_zero_variance_groups=false",
        "checkpoint.every_steps=2",
        "checkpoint.keep_last=9",
    ]
    train(small_run(tmp_path, *later, f"checkpoint.background={background}", steps=7), dry_run=False)
    found = sorted((tmp_path / "r" / "checkpoints").glob("step_*"))
    assert [path.name for path in found] == ["step_000002", "step_000004", "step_000006", "step_000007"]
    written = [path / "actor" / "written.txt" for path in found]
    if background:
        assert [path.read_text() for path in written] == ["3", "5", "7", "7"]
    else:
        assert not any(path.exists() for path in written)


def test_an_error_in_the_next_step_keeps_the_checkpoint_that_is_being_written(tmp_path):
    later = [f"backend={FAULTS}:WritesLater", "checkpoint.every_steps=3"]
    train(small_run(tmp_path / "whole", *later, steps=7), dry_run=False)
    with pytest.raises(RuntimeError, match="fourth step"):
        train(small_run(tmp_path / "cut", *later, f"plugins.hooks=['{FAULTS}:raises']", steps=7), dry_run=False)
    assert [path.name for path in (tmp_path / "cut" / "r" / "checkpoints").iterdir()] == ["step_000003"]
    train(small_run(tmp_path / "cut", *later, steps=7), dry_run=False)
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "cut")


@pytest.mark.parametrize("runtime", ["local", "ray"])
def test_a_raising_reward_loses_no_earlier_step(tmp_path, runtime):
    """With the reward fixed, the run resumes and gives the same results as one without the error."""
    code = """
from pathlib import Path
from rlcore import hookimpl
FLAG = Path(__file__).with_name("flag")
def score(completion, digits):
    assert not FLAG.exists(), "not today"
    return float(completion[:1] == min(digits))
class Ends:
    @hookimpl
    def rlcore_step_end(self, run, step, metrics):
        if step == 2:
            FLAG.write_text("")
"""
    file = tmp_path / "mine.py"
    file.write_text(code)
    mine = [f"reward={file}:score", "reward.on_error=raise", f"runtime={runtime}"]
    train(small_run(tmp_path / "whole", *mine, steps=4), dry_run=False)
    with pytest.raises(RunError, match="not today"):
        train(small_run(tmp_path / "cut", *mine, f"plugins.hooks=['{file}:Ends']", steps=4), dry_run=False)
    (tmp_path / "flag").unlink()
    assert [path.name for path in (tmp_path / "cut" / "r" / "checkpoints").iterdir()] == ["step_000002"]
    train(small_run(tmp_path / "cut", *mine, steps=4), dry_run=False)
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "cut")


def test_an_error_of_saving_does_not_hide_the_error_that_ended_the_run(tmp_path):
    (tmp_path / "mine.py").write_text("""
import itertools
from rlcore.backends.local import LocalBackend
from rlcore.errors import ModelError
calls = itertools.count()
def score(completion):
    assert next(calls) < 60, "not today"
    return 1.0
class Unsaved(LocalBackend):
    def save(self, directory):
        raise ModelError("the tokenizer is gone")
""")
    mine = [f"reward={tmp_path}/mine.py:score", "reward.on_error=raise", f"backend={tmp_path}/mine.py:Unsaved"]
    with pytest.raises(RunError, match="not today") as raised:
        train(small_run(tmp_path, *mine, steps=4), dry_run=False)
    first, *_, last = raised.value.__notes__
    assert first == "while handling this error: ModelError: the tokenizer is gone"
    assert last == "checkpoint of step 1 could not be written. There is no earlier one."


def test_hooks_receive_the_samples_of_every_evaluation(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("""
import json
from rlcore import hookimpl
class Sees:
    @hookimpl
    def rlcore_evaluated(self, run, step, samples):
        with (run.directory / "seen.jsonl").open("a") as seen:
            seen.write(json.dumps([step, samples.fetch("reward").mean().item(), len(samples)]) + "\\n")
""")
    train(small_run(tmp_path, f"plugins.hooks=['{file}:Sees']", "eval.every_steps=2", steps=3), dry_run=False)
    seen = [json.loads(line) for line in (tmp_path / "r" / "seen.jsonl").read_text().splitlines()]
    rewards = [line["eval/reward"] for line in metrics(tmp_path) if "eval/reward" in line]

    assert [(step, count) for step, _, count in seen] == [(0, 16), (2, 16), (3, 16)]
    assert [reward for _, reward, _ in seen] == pytest.approx(rewards)


def test_the_evaluation_before_training_can_be_left_out(tmp_path):
    train(small_run(tmp_path, "eval.before_training=false", "eval.every_steps=2", steps=3), dry_run=False)

    assert [line["step"] for line in metrics(tmp_path) if "eval/reward" in line] == [2, 3]


def test_hooks_receive_the_calls_of_steps_evaluations_and_checkpoints(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("""
from rlcore import hookimpl
class Sees:
    @hookimpl
    def rlcore_step_end(self, run, step, calls, experience):
        self.note(run, f"step {step} {len(experience)} advantage={'advantage' in experience}", calls)
    @hookimpl
    def rlcore_evaluated(self, run, step, calls):
        self.note(run, f"evaluation {step}", calls)
    @hookimpl
    def rlcore_checkpoint_saved(self, run, step, calls):
        self.note(run, f"checkpoint {step}", calls)
    def note(self, run, what, calls):
        names = [call.name for call in calls if call.pool]
        with (run.directory / "seen.txt").open("a") as seen:
            print(what, *dict.fromkeys(names), file=seen)
""")
    more = ["algorithm.minibatches=1", "algorithm.skip_zero_variance_groups=false", "checkpoint.every_steps=1"]
    train(small_run(tmp_path, f"plugins.hooks=['{file}:Sees']", *more, steps=1), dry_run=False)

    assert (tmp_path / "r" / "seen.txt").read_text().splitlines() == [
        "evaluation 0 rollout.generate reward.score",
        "evaluation 1 rollout.generate reward.score",
        "step 1 32 advantage=True rollout.generate reward.score actor.update weight sync reward.examples",
        "checkpoint 1 actor.save actor.finish_save actor.saved",
    ]


@pytest.mark.parametrize("fault", ["DiesInStep", "DiesWhileSaving"])
def test_a_killed_run_resumes_with_bitwise_equal_results(tmp_path, fault):
    more = ["checkpoint.every_steps=2", "algorithm.minibatches=1", f"backend={FAULTS}:{fault}"]
    train(small_run(tmp_path / "whole", *more[:2], steps=6), dry_run=False)
    arguments = small_run(tmp_path / "cut", *more, steps=6)
    killed = command(*arguments)
    killed.communicate(timeout=HANG_S)
    assert killed.returncode == -signal.SIGKILL
    done = command(*arguments, RLCORE_TEST_RESUMED="1")
    output, _ = done.communicate(timeout=HANG_S)
    assert done.returncode == 0, output
    assert "resumes at step" in output
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "cut")


def test_a_dead_host_ends_the_run_and_is_named(tmp_path):
    mark = uuid.uuid4().hex
    arguments = small_run(tmp_path, "runtime=ray", "algorithm.minibatches=1", f"backend={FAULTS}:DiesInStep", steps=6)
    process = command(*arguments, mark=mark)
    output, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 75
    assert "the host of rank 0 of pool 'main' died" in output
    assert marked(mark) == []


def test_only_the_last_checkpoints_are_kept(tmp_path):
    train(small_run(tmp_path, "checkpoint.every_steps=1", "checkpoint.keep_last=2", steps=4), dry_run=False)
    assert sorted(p.name for p in (tmp_path / "r" / "checkpoints").iterdir()) == ["step_000003", "step_000004"]


def test_a_full_disk_keeps_the_last_checkpoint_intact(tmp_path):
    limited = (
        "import resource, signal, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), -1));"
        "from rlcore.cli import main; sys.exit(main(sys.argv[2:]))"
    )
    arguments = ["train", *small_run(tmp_path, "checkpoint.every_steps=1", steps=2)]
    assert subprocess.run([sys.executable, "-m", "rlcore", *arguments], timeout=HANG_S, check=False).returncode == 0
    more = [item if not item.startswith("trainer.steps") else "trainer.steps=3" for item in arguments]
    full = subprocess.run(
        [sys.executable, "-c", limited, "300000", *more], timeout=HANG_S, capture_output=True, text=True, check=False
    )
    assert full.returncode == 1
    assert "checkpoint of step 3 could not be written" in full.stderr
    assert "The last complete one is" in full.stderr
    names = sorted(p.name for p in (tmp_path / "r" / "checkpoints").iterdir())
    assert names == ["step_000001", "step_000002"]
    again = subprocess.run(
        [sys.executable, "-m", "rlcore", *more], timeout=HANG_S, capture_output=True, text=True, check=False
    )
    assert again.returncode == 0
    assert "resumes at step 2" in again.stdout


def test_non_finite_gradients_are_skipped_and_then_stop_the_run(tmp_path):
    with pytest.raises(RunError, match="2 steps in a row had a loss or gradient that is not finite"):
        train(small_run(tmp_path, f"backend={FAULTS}:AlwaysNaN", "trainer.max_skipped_steps=2", steps=6), dry_run=False)
    assert len(json.loads((tmp_path / "r" / "bad_samples.json").read_text())["sample_ids"]) == 32
    assert metrics(tmp_path)[1]["actor/skipped"] == 1.0


@pytest.mark.parametrize("runtime", ["local", "ray"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_run_with_a_checkpoint_and_no_process_left(tmp_path, runtime, number):
    mark = uuid.uuid4().hex
    process = command(*small_run(tmp_path, f"runtime={runtime}", steps=100000), mark=mark)
    _wait_for_steps(tmp_path / "r" / "metrics.jsonl", 3)
    process.send_signal(number)
    output, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == (130 if number == signal.SIGINT else 0), output
    assert len(list((tmp_path / "r" / "checkpoints").glob("step_*"))) == 1
    assert marked(mark) == []


def test_a_second_interrupt_abandons_the_step(tmp_path):
    mark = uuid.uuid4().hex
    process = command(
        *small_run(tmp_path, "sampling.max_response_tokens=100", "reward={name:length,max:3}", steps=100000), mark=mark
    )
    _wait_for_steps(tmp_path / "r" / "metrics.jsonl", 1)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=HANG_S)
    assert process.returncode == 130
    assert marked(mark) == []


def test_an_interrupt_before_the_first_step_ends_the_run_and_all_its_processes(tmp_path):
    mark = uuid.uuid4().hex
    process = command(*small_run(tmp_path, "runtime=ray", "trackers=[console,jsonl]", steps=100000), mark=mark)
    _wait_for_steps(tmp_path / "r" / "metrics.jsonl", -1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 130, output
    began = re.search(r"^step +[01]/", output, re.MULTILINE)  # on a slow machine the steps may have begun
    assert ("ended early" in output and "interrupted" in output) or (began and "stopped early" in output), output
    assert "Traceback" not in output
    assert "Stack" not in output
    _wait_until_gone(mark)


def test_two_runs_never_share_a_directory(tmp_path):
    process = command(*small_run(tmp_path, steps=100000))
    _wait_for_steps(tmp_path / "r" / "metrics.jsonl", 1)
    with pytest.raises(ConfigError, match=rf"another process is training in {tmp_path}/r\n.*run.name=NAME"):
        train(small_run(tmp_path), dry_run=False)
    process.kill()
    process.communicate(timeout=HANG_S)
    train(small_run(tmp_path, steps=1), dry_run=False)
    assert len(metrics(tmp_path)) == 2


def test_unnamed_runs_that_start_at_the_same_time_get_separate_directories(tmp_path, monkeypatch):
    monkeypatch.setattr("rlcore.api.run._new_name", lambda config, overrides: "same")
    for _ in range(2):
        train(small_run(tmp_path, "run.name=", steps=1), dry_run=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["same", "same-2"]


def test_a_checkpoint_that_exists_only_on_another_node_is_rejected(tmp_path):
    more = ["checkpoint.every_steps=1", f"algorithm={FAULTS}:Elsewhere"]
    with pytest.raises(
        RunError, match=r"(?s)exists on the node of role 'actor', but not on this one.*run.directory=DIR"
    ):
        train(small_run(tmp_path, *more), dry_run=False)
    assert list((tmp_path / "r" / "checkpoints").iterdir()) == []


def _wait_until_gone(mark: str) -> None:
    wait_until(lambda: not marked(mark))  # Ray's agents may take a minute to notice that their node is gone


def _wait_for_steps(path: Path, steps: int) -> None:
    wait_until(lambda: path.exists() and len(path.read_text().splitlines()) > steps)
