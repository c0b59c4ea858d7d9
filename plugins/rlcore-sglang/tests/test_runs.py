"""Complete runs from the command line, with trainer and engine in one virtual environment and in two."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import rlcore_sglang

from rlcore.testing.waiting import HANG_S

REPOSITORY = Path(__file__).resolve().parents[3]
CONTROLLER = Path(os.environ.get("RLCORE_CONTROLLER_PYTHON", REPOSITORY / ".venv" / "bin" / "python"))
"""Python of a virtual environment with rlcore but without SGLang; it finds this plugin through PYTHONPATH."""
TWO_STEPS = ("trainer.steps=2", "trainer.prompts_per_step=4")
RARELY = ["eval.every_steps=0", "checkpoint.every_steps=100"]

pytestmark = pytest.mark.slow


def train(python, directory, *settings, length=TWO_STEPS):
    """Run `rlcore train` and return the metrics of each step."""
    command = [str(python), "-m", "rlcore", "train", "preset=quickstart", "rollout=sglang", *RARELY, *length, *settings]
    command += [f"run.directory={directory}", "run.name=run"]
    path = {"PYTHONPATH": str(Path(rlcore_sglang.__file__).parents[1])} if python == CONTROLLER else {}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=HANG_S, cwd=directory, env={**os.environ, **path}
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = (Path(directory) / "run" / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "actor/loss" in line]


def needs_controller():
    if not CONTROLLER.is_file():
        pytest.skip(f"no Python in {CONTROLLER}; set RLCORE_CONTROLLER_PYTHON to one with rlcore")


def check(steps):
    assert [line["step"] for line in steps] == [1, 2]
    assert all(line["reward/num_score"] == 32 for line in steps)
    assert all(line["actor/rollout_logprob_gap"] < 5e-3 for line in steps), "trainer and engine have different weights"


def test_a_run_in_one_virtual_environment(tmp_path):
    check(train(sys.executable, tmp_path, "runtime=local"))


def test_a_run_with_actor_and_rollout_in_one_pool_on_ray(tmp_path):
    check(train(sys.executable, tmp_path, "runtime=ray", "placement=colocated", "device_sharing=always"))


def check_async(directory, python, *settings):
    """Train five steps with schedule=async, and check that all prompts were trained on, within the bound."""
    ahead = ["schedule=async", "placement=split", "rollout.max_batch_size=8", *settings]
    steps = train(python, directory, *ahead, length=["trainer.steps=5", "trainer.prompts_per_step=8"])
    last = json.loads((directory / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert (last["step"], last["progress/samples"]) == (5, 5 * 8 * 8)
    assert all(line["schedule/staleness_max"] <= 4 for line in steps)
    assert steps[0]["actor/rollout_logprob_gap"] < 5e-3


def test_weights_arrive_while_responses_are_generated(tmp_path):
    check_async(tmp_path, sys.executable, "runtime=ray")


def test_responses_in_one_pool_continue_after_the_update(tmp_path):
    shared = ["runtime=ray", "schedule=async", "placement=colocated", "device_sharing=always"]
    length = ["trainer.steps=5", "trainer.prompts_per_step=8"]
    steps = train(sys.executable, tmp_path, *shared, "rollout.max_batch_size=8", length=length)
    assert (steps[-1]["step"], steps[-1]["progress/samples"]) == (5, 5 * 8 * 8)
    assert all(line["schedule/staleness_max"] <= 4 for line in steps)
    assert sum(line.get("schedule/set_aside", 0) for line in steps) > 0
    assert steps[0]["actor/rollout_logprob_gap"] < 5e-3


def test_the_quickstart_learns(tmp_path):
    steps = train(sys.executable, tmp_path, "runtime=local", length=["trainer.steps=40"])
    rewards = [line["reward/mean"] for line in steps]
    assert steps[-1]["eval/pass_rate"] > 0.1, "it is 0.008 before training"
    assert sum(rewards[-5:]) / 5 > 2 * sum(rewards[:5]) / 5
    assert all(line["actor/rollout_logprob_gap"] < 5e-3 for line in steps)


@pytest.mark.parametrize("transfer", ["object_store", "collective"])
def test_a_run_with_trainer_and_engine_in_two_virtual_environments_on_ray(tmp_path, transfer):
    needs_controller()
    pools = ["runtime=ray", "placement=split", f"pools.rollout.python={sys.executable}"]
    check(train(CONTROLLER, tmp_path, *pools, f"transfer={transfer}"))


def test_weights_arrive_in_another_virtual_environment_while_it_generates(tmp_path):
    needs_controller()
    check_async(tmp_path, CONTROLLER, "runtime=ray", f"pools.rollout.python={sys.executable}")


@pytest.fixture
def four_cores():
    """Address of a Ray cluster with four cores, whatever the machine has."""
    import ray

    ray.init(num_cpus=4, include_dashboard=False, _node_ip_address="127.0.0.1", logging_level=logging.ERROR)
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


def test_a_model_in_two_shards_is_broadcast_to_an_engine_of_two_ranks(tmp_path, four_cores):
    pytest.importorskip("rlcore_fsdp", reason="pip install rlcore-fsdp: its shards are what is gathered here")
    pools = ["runtime=ray", f"runtime.address={four_cores}", "placement=split", "pools.actor.devices_per_node=2"]
    pools += ["runtime.start_timeout_s=400"]
    engine = ["pools.rollout.devices_per_node=2", "rollout.tensor_parallel=2", "transfer=collective"]
    check(train(sys.executable, tmp_path, *pools, "backend=fsdp", *engine))


def test_a_run_with_only_the_engine_in_another_virtual_environment(tmp_path):
    needs_controller()
    check(train(CONTROLLER, tmp_path, "runtime=local", f"rollout.python={sys.executable}"))
