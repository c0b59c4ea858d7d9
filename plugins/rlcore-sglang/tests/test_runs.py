"""Whole runs from the command line: in one environment, and with trainer and engine in two."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
CONTROLLER = Path(os.environ.get("RLCORE_CONTROLLER_PYTHON", REPOSITORY / ".venv" / "bin" / "python"))
"""Python of an environment with rlcore and this plugin, and without SGLang."""
SMALL = ["trainer.steps=2", "trainer.prompts_per_step=4", "eval.every_steps=0", "checkpoint.every_steps=100"]

pytestmark = pytest.mark.slow


def train(python, directory, *settings):
    """Run `rlcore train`; returns the metrics of each step."""
    command = [str(python), "-m", "rlcore", "train", "preset=quickstart", "rollout=sglang", *SMALL, *settings]
    command += [f"run.directory={directory}", "run.name=run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=directory)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = (Path(directory) / "run" / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "actor/loss" in line]


def needs_controller():
    if not CONTROLLER.is_file():
        pytest.skip(f"no Python in {CONTROLLER}; set RLCORE_CONTROLLER_PYTHON to one with rlcore and this plugin")


def check(steps):
    assert [line["step"] for line in steps] == [1, 2]
    assert all(line["reward/num_score"] == 32 for line in steps)
    assert all(line["actor/rollout_logprob_gap"] < 5e-3 for line in steps), "trainer and engine have other weights"


def test_a_run_in_one_environment(tmp_path):
    check(train(sys.executable, tmp_path, "runtime=local"))


def test_trainer_and_engine_in_two_environments_by_ray(tmp_path):
    needs_controller()
    pools = ["runtime=ray", "placement=split", f"pools.rollout.python={sys.executable}"]
    check(train(CONTROLLER, tmp_path, *pools))


def test_only_the_engine_in_another_environment(tmp_path):
    needs_controller()
    check(train(CONTROLLER, tmp_path, "runtime=local", f"rollout.python={sys.executable}"))
