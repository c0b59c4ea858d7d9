"""Complete runs with two hosts on Ray: same metrics as `local`, with tensor- and pipeline-parallel workers."""

import logging
import os
import shutil
from pathlib import Path

import pytest
import ray
from rlcore_tests.runs import metrics, small_run

from rlcore.cli.train import run as train

BACKEND = f"backend={Path(__file__).with_name('cpu_double.py')}:CPUMegatron"
UNEVEN = ["trainer.prompts_per_step=7", "sampling.samples_per_prompt=3"]
PPO = ["algorithm=ppo", "algorithm.kl.coefficient=0.1"]
TWO = ["runtime=ray", "pools.main.devices_per_node=2"]
TENSOR, PIPELINE = "backend.tensor_parallel=2", "backend.pipeline_parallel=2"
CONTEXT = "backend.context_parallel=2"


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

    def run(*more, steps=3):
        if (more, steps) not in made:
            directory = tmp_path_factory.mktemp("local")
            train(settings(directory, *more, steps=steps), dry_run=False)
            made[more, steps] = metrics(directory)
        return made[more, steps]

    return run


@pytest.mark.parametrize(
    ("algorithm", "grid"),
    [
        pytest.param((), PIPELINE, id="grpo on two stages"),
        pytest.param(
            (*PPO, "device_sharing=always"), TENSOR, id="ppo on two tensor ranks that share devices with the rollout"
        ),
        pytest.param(PPO, PIPELINE, id="ppo on two stages", marks=pytest.mark.slow),
        pytest.param(PPO, CONTEXT, id="ppo on two context ranks", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_train_with_the_same_metrics_as_local(algorithm, grid, tmp_path, oracle):
    train(settings(tmp_path, *algorithm, BACKEND, grid, *TWO), dry_run=False)

    for found, expected in zip(metrics(tmp_path), oracle(*algorithm), strict=True):
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.slow
def test_weights_of_two_stages_are_sent_to_a_rollout_in_another_pool(tmp_path, oracle):
    ray.init(num_cpus=3, include_dashboard=False, _node_ip_address="127.0.0.1", logging_level=logging.WARNING)
    try:
        address = f"runtime.address={ray.get_runtime_context().gcs_address}"
        more = [BACKEND, PIPELINE, "runtime=ray", address, "placement=split", "pools.actor.devices_per_node=2"]
        train(settings(tmp_path, *more), dry_run=False)
    finally:
        ray.shutdown()

    for found, expected in zip(metrics(tmp_path), oracle(), strict=True):
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("grid", [TENSOR, PIPELINE])
def test_the_quickstart_learns_on_two_ranks(grid, tmp_path):
    more = ["trainer.prompts_per_step=64", "sampling.samples_per_prompt=8", BACKEND, grid, *TWO]
    train(settings(tmp_path, *more, steps=30), dry_run=False)

    rewards = [line["reward/mean"] for line in metrics(tmp_path)[1:]]
    assert rewards[0] < 0.15
    assert sum(rewards[-5:]) / 5 > 2 * rewards[0]


@pytest.mark.slow
def test_two_tensor_ranks_train_like_local_and_resume_exactly(tmp_path, oracle):
    every = ["checkpoint.every_steps=2", BACKEND, TENSOR, *TWO]
    train(settings(tmp_path / "whole", *every, steps=4), dry_run=False)
    whole = metrics(tmp_path / "whole")
    for found, expected in zip(whole, oracle(steps=4), strict=True):
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)

    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "r" / "checkpoints" / "step_000004")
    train(settings(tmp_path / "cut", *every, steps=4), dry_run=False)

    assert metrics(tmp_path / "cut") == whole
