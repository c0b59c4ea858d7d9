"""The files that describe a start, and `rlcore train RUN`, which continues a run with its own settings."""

import json
import shutil
import subprocess
import sys

import pytest
import yaml
from rlcore_tests.runs import metrics, small_run

from rlcore.cli import main
from rlcore.config.build import build, to_plain
from rlcore.config.compose import compose
from rlcore.config.schema import Config
from rlcore.testing.waiting import HANG_S
from rlcore.trainer.starts import _git_state
from rlcore.version import __version__


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Return the directory of a run of two steps; tests must not change it."""
    folder = tmp_path_factory.mktemp("stopped")
    settings = small_run(
        folder, "algorithm=ppo", "algorithm.epochs=2", "eval.every_steps=2", "run.resume=never", steps=2
    )
    assert main(["train", *settings]) == 0
    return folder / "r"


@pytest.fixture
def run(stopped, tmp_path):
    return shutil.copytree(stopped, tmp_path / "r")


def starts(run):
    return [json.loads(line) for line in (run / "starts.jsonl").read_text().splitlines()]


def refused(capsys, *arguments):
    capsys.readouterr()
    assert main(["train", *map(str, arguments)]) == 2
    return capsys.readouterr().err.removeprefix("error: ").splitlines()


def test_a_run_continues_with_its_own_settings_bit_for_bit(run, tmp_path):
    assert main(["train", str(run), "trainer.steps=4"]) == 0
    assert (
        main(["train", *small_run(tmp_path / "whole", "algorithm=ppo", "algorithm.epochs=2", "eval.every_steps=2")])
        == 0
    )

    assert metrics(tmp_path) == metrics(tmp_path / "whole")
    assert [start["step"] for start in starts(run)] == [0, 2]


def test_arguments_override_the_settings_of_the_run_and_the_changes_are_reported(run, caplog):
    assert main(["train", "trainer.steps=3", str(run), "algorithm.epochs=1"]) == 0

    assert "algorithm.epochs is now 1; it was 2 up to this checkpoint" in caplog.text
    assert yaml.safe_load((run / "config.yaml").read_text())["algorithm"] == {"name": "ppo", "epochs": 1}


def test_a_run_can_have_the_form_of_a_setting(run, tmp_path, monkeypatch, capsys):
    run.rename(tmp_path / "lr=1e-5")
    monkeypatch.chdir(tmp_path)

    assert main(["train", "lr=1e-5", "trainer.steps=3", "--dry-run"]) == 0
    assert f"{tmp_path}/lr=1e-5 (resumes at step 2)" in capsys.readouterr().out
    assert refused(capsys, "", "lr=1e-5")[0] == "an argument is empty"


def test_a_run_without_a_checkpoint_starts_with_its_settings(run, tmp_path):
    shutil.rmtree(run / "checkpoints")

    assert main(["train", str(run), "trainer.steps=1"]) == 0

    assert [row["step"] for row in metrics(tmp_path)] == [0, 1]


def test_a_run_can_have_been_moved(run, tmp_path):
    moved = run.rename(tmp_path / "other name")

    assert main(["train", str(moved), "trainer.steps=3"]) == 0

    assert (moved / "checkpoints" / "step_000003").is_dir()
    assert not run.exists()


def test_another_working_directory_is_reported(run, tmp_path, monkeypatch, caplog):
    assert main(["train", str(run), "--dry-run"]) == 0
    assert "relative paths" not in caplog.text

    monkeypatch.chdir(tmp_path)
    assert main(["train", str(run), "--dry-run"]) == 0

    before = starts(run)[-1]["directory"]
    assert f"{run} was started in {before}: relative paths in its settings now begin in {tmp_path}" in caplog.text


def test_a_run_of_an_earlier_version_continues_from_its_checkpoint(run):
    (run / "config.yaml").unlink()

    assert main(["train", str(run), "trainer.steps=3"]) == 0

    assert (run / "checkpoints" / "step_000003").is_dir()


def test_the_recorded_config_is_that_of_the_run_and_works_as_a_preset(stopped):
    plain = yaml.safe_load((stopped / "config.yaml").read_text())
    trained = json.loads((stopped / "checkpoints" / "step_000002" / "trainer.json").read_text())["config"]

    assert plain == trained
    assert to_plain(build(Config, plain)) == plain
    assert compose([f"preset={stopped / 'config.yaml'}"]).plain == plain


def test_a_start_is_described_by_command_packages_and_machine(stopped):
    (start,) = starts(stopped)

    assert start["command"] == sys.argv
    assert start["packages"]["rlcore"] == __version__
    assert {"torch", "transformers"} <= start["packages"].keys()
    assert start["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")


def test_the_state_of_git_names_commit_branch_and_changed_files(tmp_path):
    def git(*arguments):
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=tmp_path, check=True, timeout=HANG_S
        )

    assert _git_state(tmp_path) is None
    git("init", "-q", "-b", "mine")
    (tmp_path / "reward.py").write_text("a")
    git("add", ".")
    git("commit", "-qm", "one")
    clean = _git_state(tmp_path)
    (tmp_path / "reward.py").write_text("b")

    assert (len(clean["commit"]), clean["branch"], clean["changed"]) == (40, "mine", [])
    assert _git_state(tmp_path) == clean | {"changed": ["reward.py"]}


def test_a_directory_that_is_no_run_is_refused(run, tmp_path, capsys):
    (tmp_path / "empty").mkdir()

    first, second = refused(capsys, tmp_path / "rr")
    assert first.endswith(f"there is no run of this name. Did you mean '{run}'?")
    assert second.endswith("rlcore train outputs/RUN")
    assert "has neither config.yaml nor a checkpoint" in refused(capsys, tmp_path / "empty")[0]
    assert "is not key=value" in refused(capsys, run, run.parent)[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [("{a: [", "config.yaml is damaged: while parsing"), ("- 1", "has neither"), ("a: 1", "a: no such setting.")],
)
def test_a_damaged_config_is_refused(run, capsys, text, words):
    (run / "config.yaml").write_text(text)

    assert words in refused(capsys, run)[0]


def test_samples_of_a_rollout_are_not_a_run_to_continue(stopped, tmp_path, capsys):
    more = ["trainer.steps=1", "trainer.prompts_per_step=2", "sampling.samples_per_prompt=1"]
    assert main(["rollout", str(stopped), str(tmp_path / "samples"), *more]) == 0

    first, second = refused(capsys, tmp_path / "samples")
    assert first.endswith("has samples of  rlcore rollout")
    assert second.endswith(f"schedule.replay={tmp_path / 'samples'}")
