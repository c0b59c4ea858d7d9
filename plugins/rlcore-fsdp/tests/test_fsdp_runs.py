"""Complete runs with two hosts on Ray: same metrics as `local`, and exact resume after a rank was killed."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from rlcore_tests.runs import metrics, small_run

from rlcore.cli.train import run as train
from rlcore.testing.waiting import HANG_S

FAULTS = Path(__file__).with_name("fsdp_faults.py")
UNEVEN = ["trainer.prompts_per_step=7", "sampling.samples_per_prompt=3"]
PPO = ["algorithm=ppo", "algorithm.kl.coefficient=0.1"]
TWO = ["runtime=ray", "pools.main.devices_per_node=2"]


@pytest.fixture(scope="module", autouse=True)
def _quickstart_assets():
    """Use the user's cache directory, so that the assets are created only once."""
    os.environ.setdefault("RLCORE_CACHE", str(Path.home() / ".cache" / "rlcore"))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def settings(directory, *more, steps=3):
    return small_run(directory, *UNEVEN, *more, steps=steps)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    """Function from arguments to the metrics of a run with backend=local in one process."""

    made = {}

    def run(*more):
        if more not in made:
            directory = tmp_path_factory.mktemp("local")
            train(settings(directory, *more), dry_run=False)
            made[more] = metrics(directory)
        return made[more]

    return run


@pytest.mark.parametrize(
    ("algorithm", "more"),
    [
        ([], TWO),
        (PPO, [*TWO, "backend.replicate=2"]),
    ],
    ids=["grpo", "ppo with reference and critic, hybrid"],
)
def test_two_ranks_train_with_the_same_metrics_as_local(algorithm, more, tmp_path, oracle):
    train(settings(tmp_path, *algorithm, "backend=fsdp", *more), dry_run=False)

    for found, expected in zip(metrics(tmp_path), oracle(*algorithm), strict=True):
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("kept", ["backend.reshard_after_forward=false", "backend.tensor_parallel=2"])
def test_adapters_that_share_a_reference_train_the_same_on_two_ranks_as_on_one(kept, tmp_path):
    adapters = ["backend=fsdp", "backend.lora_rank=4", "algorithm.kl.coefficient=0.1", "optimizer.lr=1e-3"]
    for name, more in {"one": [], "two": [*TWO, kept]}.items():
        train(settings(tmp_path / name, *adapters, *more), dry_run=False)

    found, expected = metrics(tmp_path / "two"), metrics(tmp_path / "one")
    for line, wanted in zip(found, expected, strict=True):
        assert line == pytest.approx(wanted, rel=1e-3, abs=1e-5)
    assert found[-1]["actor/kl_to_reference"] > 1e-6, "the reference is what the policy was"


def test_weights_of_two_ranks_are_sent_to_a_rollout_in_another_pool(tmp_path, oracle):
    ray.init(num_cpus=3, include_dashboard=False, _node_ip_address="127.0.0.1", logging_level=logging.WARNING)
    try:
        address = f"runtime.address={ray.get_runtime_context().gcs_address}"
        more = ["backend=fsdp", "runtime=ray", address, "placement=split", "pools.actor.devices_per_node=2"]
        train(settings(tmp_path, *more), dry_run=False)
    finally:
        ray.shutdown()

    for found, expected in zip(metrics(tmp_path), oracle(), strict=True):
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.slow
def test_the_quickstart_learns_on_two_ranks(tmp_path):
    more = ["trainer.prompts_per_step=64", "sampling.samples_per_prompt=8", "backend=fsdp", *TWO]
    train(settings(tmp_path, *more, steps=30), dry_run=False)

    rewards = [line["reward/mean"] for line in metrics(tmp_path)[1:]]
    assert rewards[0] < 0.15
    assert sum(rewards[-5:]) / 5 > 2 * rewards[0]


def command(arguments, **env):
    return subprocess.run(
        [sys.executable, "-m", "rlcore", "train", *arguments],
        env={**os.environ, **env},
        text=True,
        capture_output=True,
        timeout=HANG_S,
        check=False,
    )


EVERY = ["checkpoint.every_steps=2", "algorithm.minibatches=1", *TWO]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Metrics of a run in which no rank is killed."""
    directory = tmp_path_factory.mktemp("whole")
    train(settings(directory, *EVERY, "backend=fsdp", steps=5), dry_run=False)
    return metrics(directory)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["DiesInStep", "DiesWhileSaving", "DiesWhileTrainingOn"])
def test_a_killed_rank_is_named_and_the_run_resumes_exactly(fault, tmp_path, undisturbed):
    every = [*EVERY, f"backend={FAULTS}:{fault}"]

    killed = command(settings(tmp_path / "cut", *every, steps=5))
    assert killed.returncode == 75
    assert "the host of rank 1 of pool 'main' died" in killed.stderr + killed.stdout
    resumed = command(settings(tmp_path / "cut", *every, steps=5), RLCORE_TEST_RESUMED="1")

    assert resumed.returncode == 0, resumed.stderr
    assert "resumes at step" in resumed.stdout + resumed.stderr
    assert metrics(tmp_path / "cut") == undisturbed
