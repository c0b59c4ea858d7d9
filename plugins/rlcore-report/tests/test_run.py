"""Reading the directory of a run in any state."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys

import pytest
from conftest import STEPS, rows, write_rows
from rlcore_report.run import read_run
from rlcore_tests.runs import small_run

from rlcore.errors import ConfigError
from rlcore.testing.waiting import HANG_S, wait_until


def change(directory, **facts):
    about = json.loads((directory / "run.json").read_text()) | facts
    (directory / "run.json").write_text(json.dumps({k: v for k, v in about.items() if v is not None}))


def test_a_finished_run_is_read(trained):
    run = read_run(trained)

    assert (run.state, run.step, run.total_steps, run.name) == ("finished", STEPS, STEPS, "r")
    assert run.config["trainer.steps"] == STEPS
    assert run.versions["rlcore"]
    assert run.metrics.steps == [*range(STEPS + 1)]
    assert [step for step, _ in run.metrics.known("eval/pass_rate")] == [0, 4, 8, 12]
    assert run.samples[0].keys() >= {"prompt", "completion", "reward", "step"}
    assert run.notes == []


def test_a_run_without_run_json_takes_settings_from_its_checkpoint(trained, tmp_path):
    for name in ("metrics.jsonl", "checkpoints"):
        (tmp_path / name).symlink_to(trained / name)

    run = read_run(tmp_path)

    assert (run.state, run.config["trainer.steps"], run.versions["rlcore"] != "") == ("finished", STEPS, True)
    assert run.notes == ["run.json is missing, so settings are those of the last checkpoint, if there is one"]


@pytest.mark.parametrize(
    ("summary", "state"),
    [
        ({"steps": 3, "total_steps": 12, "error": "RewardError: no"}, "crashed"),
        ({"steps": 3, "total_steps": 12, "error": "interrupted"}, "stopped"),
        ({"steps": 3, "total_steps": 12}, "stopped"),
        ({"steps": 12, "total_steps": 12}, "finished"),
        (None, "killed"),
    ],
)
def test_the_state_comes_from_the_summary(copy, summary, state):
    change(copy, summary=summary)

    assert read_run(copy).state == state


def test_a_locked_run_is_running(copy):
    change(copy, summary=None)
    with (copy / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read_run(copy).state == "running"
    assert read_run(copy).state == "killed"


def test_a_real_run_is_running_until_it_is_killed(tmp_path):
    settings = small_run(tmp_path, "trainer.prompts_per_step=2", "data.eval=", steps=100_000)
    process = subprocess.Popen(
        [sys.executable, "-m", "rlcore", "train", *settings], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        metrics = tmp_path / "r" / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and metrics.stat().st_size > 5000)
        during = read_run(tmp_path / "r")
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=HANG_S)
    after = read_run(tmp_path / "r")

    assert during.state == "running"
    assert after.state == "killed"
    assert during.step >= 1
    assert after.step >= during.step


def test_the_later_of_two_lines_of_a_step_counts(copy):
    metrics = rows(copy / "metrics.jsonl")
    write_rows(copy / "metrics.jsonl", [*metrics, {"step": 3, "reward/mean": 7.0}, {"step": 2, "x": True}])

    run = read_run(copy)

    assert dict(run.metrics.known("reward/mean"))[3] == 7.0
    assert run.metrics.known("x") == []
    assert run.metrics.steps == [*range(STEPS + 1)]


@pytest.mark.parametrize(
    ("prepare", "first", "second"),
    [
        (lambda d: None, "no such run: '{d}/copi'. Did you mean 'copy'?", "outputs/NAME"),
        (lambda d: (d / "copi").touch(), "'{d}/copi' is a file, not the directory of a run", "Type  {d}"),
        (lambda d: (d / "copi").mkdir(), "'{d}/copi' is not a run: it has neither run.json", "directory of a run"),
    ],
    ids=["missing", "a-file", "empty"],
)
def test_what_is_not_a_run_is_refused(copy, prepare, first, second):
    prepare(copy.parent)

    with pytest.raises(ConfigError) as caught:
        read_run(copy.parent / "copi")

    assert str(caught.value).splitlines()[0].startswith(first.format(d=copy.parent))
    assert second.format(d=copy.parent) in str(caught.value).splitlines()[1]


def test_a_directory_of_runs_lists_them(copy):
    with pytest.raises(ConfigError, match=f"Runs in it: {copy}"):
        read_run(copy.parent)


def test_a_newer_format_is_refused_with_both_versions(copy):
    change(copy, format=2, rlcore="0.9.1")

    with pytest.raises(ConfigError, match=r"has format 2 of rlcore 0\.9\.1; .* up to 1\nType  pip install --upgrade"):
        read_run(copy)


def test_a_damaged_run_json_is_noted(copy):
    (copy / "run.json").write_text('{"format": 1, "conf')

    run = read_run(copy)

    assert run.notes[0].startswith("run.json is damaged and was ignored")
    assert run.step == STEPS


def test_missing_metrics_are_noted(copy):
    (copy / "metrics.jsonl").unlink()

    run = read_run(copy)

    assert run.notes == ["there is no metrics.jsonl: the setting trackers does not have jsonl"]
    assert run.step == 0
