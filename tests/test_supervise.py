"""`rlcore train --supervise`: a run goes on without a person when its process dies, and ends when that does not help."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rlcore_tests.runs import metrics, small_run

from rlcore.testing.waiting import HANG_S, wait_until

EVERY_STEP = ("checkpoint.every_steps=1", "eval.every_steps=2")


def supervised(directory, *settings, steps=6):
    """Start a supervised run."""
    words = [*small_run(directory, *EVERY_STEP, *settings, steps=steps), "--supervise"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-m", "rlcore", "train", *words], stderr=subprocess.PIPE, text=True, env=environment
    )


def child_of(process):
    """Return the id of the child process, or None."""
    found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(found[0]) if found else None


def last_step(directory):
    file = directory / "r" / "metrics.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return json.loads(lines[-1])["step"] if lines else -1


def starts(directory):
    return len((directory / "r" / "starts.jsonl").read_text().splitlines())


def test_a_killed_run_goes_on_with_the_same_numbers(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    with supervised(whole) as process:
        _, text = process.communicate(timeout=HANG_S)
    assert (process.returncode, starts(whole)) == (0, 1)
    assert "supervise" not in text

    with supervised(cut) as process:
        for step in (1, 3):
            wait_until(lambda step=step: last_step(cut) >= step or process.poll() is not None)
            os.kill(child_of(process), signal.SIGKILL)
            wait_until(lambda step=step: starts(cut) > (step + 1) // 2 or process.poll() is not None)
        _, text = process.communicate(timeout=HANG_S)

    assert process.returncode == 0, text
    assert starts(cut) == 3
    assert metrics(cut) == metrics(whole)
    assert "(killed by SIGKILL); restart 2 of at most 3 in 3600 s" in text


def test_the_budget_ends_the_run_with_the_code_to_try_again(tmp_path):
    with supervised(tmp_path, "recovery.max_restarts=0") as process:
        wait_until(lambda: last_step(tmp_path) >= 1 or process.poll() is not None)
        os.kill(child_of(process), signal.SIGKILL)
        _, text = process.communicate(timeout=HANG_S)

    assert process.returncode == 75
    assert "(killed by SIGKILL), after 0 restarts in 3600 s (recovery.max_restarts, recovery.window_s)" in text


def test_a_step_that_always_kills_the_process_is_tried_twice(tmp_path):
    (tmp_path / "deadly.py").write_text("""
import os, signal
from rlcore import hookimpl

class Deadly:
    @hookimpl
    def rlcore_samples_scored(self, run, step, samples):
        if step == 3:
            os.kill(os.getpid(), signal.SIGSEGV)
""")
    with supervised(tmp_path, f"plugins.hooks=['{tmp_path}/deadly.py:Deadly']", "recovery.max_restarts=9") as process:
        _, text = process.communicate(timeout=HANG_S)

    assert process.returncode == 1
    assert "error: step 3 has failed twice in the same way (killed by SIGSEGV)" in text
    assert starts(tmp_path) == 2


@pytest.mark.parametrize(
    ("problem", "code"), [("raise ValueError('a bug')", 1), ("raise InfrastructureError('no disk')", 1)]
)
def test_only_infrastructure_failures_are_tried_again(tmp_path, problem, code):
    (tmp_path / "fails.py").write_text(f"""
from rlcore import hookimpl
from rlcore.errors import InfrastructureError

class Fails:
    @hookimpl
    def rlcore_samples_scored(self, run, step, samples):
        if step == 2:
            {problem}
""")
    with supervised(tmp_path, f"plugins.hooks=['{tmp_path}/fails.py:Fails']") as process:
        _, text = process.communicate(timeout=HANG_S)

    assert process.returncode == code, text
    assert starts(tmp_path) == (2 if "Infrastructure" in problem else 1), text
    assert ("step 2 has failed twice in the same way (infrastructure failure)" in text) == ("Infra" in problem)


@pytest.mark.parametrize("setting", ["reward=no_such_reward", "trainer.stesp=4"])
def test_a_run_that_can_never_start_is_tried_once(tmp_path, setting):
    with supervised(tmp_path, setting) as process:
        _, text = process.communicate(timeout=HANG_S)

    assert process.returncode == 2
    assert text.count("error: ") == 1
    assert "supervise" not in text


def test_sigterm_writes_a_checkpoint_and_ends(tmp_path):
    with supervised(tmp_path, "checkpoint.every_steps=100", steps=200) as process:
        wait_until(lambda: last_step(tmp_path) >= 1 or process.poll() is not None)
        process.send_signal(signal.SIGTERM)
        _, text = process.communicate(timeout=HANG_S)

    assert process.returncode == 0, text
    (checkpoint,) = (tmp_path / "r" / "checkpoints").glob("step_*")
    assert int(checkpoint.name.removeprefix("step_")) == last_step(tmp_path)
    assert starts(tmp_path) == 1


def test_a_run_without_a_name_continues_in_its_own_directory(tmp_path):
    words = [it for it in small_run(tmp_path, *EVERY_STEP, steps=6) if not it.startswith("run.name=")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "rlcore", "train", *words, "--supervise"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        wait_until(lambda: list(tmp_path.glob("quickstart-*/metrics.jsonl")) or process.poll() is not None)
        os.kill(child_of(process), signal.SIGKILL)
        _, text = process.communicate(timeout=HANG_S)

    assert process.returncode == 0, text
    (run,) = tmp_path.glob("quickstart-*")
    assert len((run / "starts.jsonl").read_text().splitlines()) == 2
