"""`rlcore train --supervise`: a run goes on without a person when its process dies, and ends when that does not help."""

import json
import os
import signal
import subprocess
import sys

import pytest
from rlcore_tests.runs import metrics, small_run

from rlcore.testing.waiting import HANG_S, wait_until

EVERY_STEP = ("checkpoint.every_steps=1", "eval.every_steps=2", "recovery.delay_s=0.1")
WAITS = """
import os, time
from pathlib import Path
from rlcore import hookimpl

class Waits:
    '''Waits at steps 2 and 4, once at each, until the process is killed.'''

    @hookimpl
    def rlcore_samples_scored(self, run, step, samples):
        mark = Path(__file__).with_name(f"reached_{step}")
        if step in (2, 4) and not mark.exists():
            mark.write_text(str(os.getpid()))
            time.sleep(%f)
"""
"""Hooks, so that a test kills a process at a step whatever the speed of the machine."""


def supervised(directory, *settings, steps=6):
    """Start a supervised run."""
    words = [*small_run(directory, *EVERY_STEP, *settings, steps=steps), "--supervise"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-m", "rlcore", "train", *words], stderr=subprocess.PIPE, text=True, env=environment
    )


def waits(directory):
    """Return the setting of hooks that wait at steps 2 and 4."""
    (directory / "waits.py").write_text(WAITS % HANG_S)
    return f"plugins.hooks=['{directory}/waits.py:Waits']"


def kill_at(step, directory, process):
    """Kill the child that waits at this step."""
    mark = directory / f"reached_{step}"
    wait_until(lambda: (mark.exists() and mark.read_text()) or process.poll() is not None)
    os.kill(int(mark.read_text()), signal.SIGKILL)


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

    cut.mkdir()
    with supervised(cut, waits(cut)) as process:
        kill_at(2, cut, process)
        kill_at(4, cut, process)
        _, text = process.communicate(timeout=HANG_S)

    assert process.returncode == 0, text
    assert starts(cut) == 3
    assert metrics(cut) == metrics(whole)
    assert "after step 3 (killed by SIGKILL); restart 2 of at most 3 in 3600 s, after 0.2 s" in text


def test_the_budget_ends_the_run_with_the_code_to_try_again(tmp_path):
    with supervised(tmp_path, waits(tmp_path), "recovery.max_restarts=0") as process:
        kill_at(2, tmp_path, process)
        _, text = process.communicate(timeout=HANG_S)

    assert process.returncode == 75
    assert "(killed by SIGKILL), after 0 restarts in 3600 s (recovery.max_restarts, recovery.window_s)" in text
    assert f"to continue:  rlcore train {tmp_path}/r --supervise" in text


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
    ("problem", "code", "tries"),
    [
        ("ValueError('a bug')", 1, 1),
        ("InfrastructureError('no network')", 75, 3),
        ("OSError(errno.EIO, 'Input/output error')", 75, 3),
    ],
)
def test_only_infrastructure_failures_are_tried_again(tmp_path, problem, code, tries):
    (tmp_path / "fails.py").write_text(f"""
import errno
from rlcore import hookimpl
from rlcore.errors import InfrastructureError

class Fails:
    @hookimpl
    def rlcore_samples_scored(self, run, step, samples):
        if step == 2:
            raise {problem}
""")
    with supervised(
        tmp_path,
        f"plugins.hooks=['{tmp_path}/fails.py:Fails']",
        "recovery.max_restarts=2",
        "checkpoint.background=false",
    ) as process:
        _, text = process.communicate(timeout=HANG_S)

    assert process.returncode == code, text
    assert starts(tmp_path) == tries, text


@pytest.mark.parametrize("setting", ["reward=no_such_reward", "trainer.stesp=4"])
def test_a_run_that_can_never_start_is_tried_once(tmp_path, setting):
    with supervised(tmp_path, setting) as process:
        _, text = process.communicate(timeout=HANG_S)

    assert process.returncode == 2
    assert text.count("error: ") == 1
    assert "supervise" not in text


def test_sigterm_writes_a_checkpoint_and_ends(tmp_path):
    with supervised(tmp_path, "checkpoint.every_steps=100000", steps=100_000) as process:
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
    words = [it for it in words if not it.startswith("plugins.hooks=")] + [waits(tmp_path), "--supervise"]
    command = [sys.executable, "-m", "rlcore", "train", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        kill_at(2, tmp_path, process)
        kill_at(4, tmp_path, process)
        _, text = process.communicate(timeout=HANG_S)

    assert process.returncode == 0, text
    (run,) = tmp_path.glob("quickstart-*")
    assert len((run / "starts.jsonl").read_text().splitlines()) == 3
