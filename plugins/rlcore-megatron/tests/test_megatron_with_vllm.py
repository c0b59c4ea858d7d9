"""Training with Megatron on two tensor-parallel ranks, sampling with vLLM, in one shared pool and in separate pools."""

import json
import logging
from importlib.util import find_spec
from pathlib import Path

import pytest
import ray

from rlcore.cli.train import run as train

MISSING = [name for name in ("vllm", "rlcore_vllm", "megatron") if find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"not here: {', '.join(MISSING)}; make test-vllm has both"),
]

BASE = ["model.path=quickstart:model", "data.train=quickstart:train", "reward=sorted_digits", "trackers=jsonl"]
BASE += ["trainer.steps=3", "trainer.prompts_per_step=16", "sampling.samples_per_prompt=4", "optimizer.lr=3e-4"]
BASE += ["sampling.max_response_tokens=8", "run.name=r", "runtime=ray", "rollout=vllm", "rollout.max_batch_size=64"]
MEGATRON = [f"backend={Path(__file__).with_name('cpu_double.py')}:CPUMegatron", "backend.tensor_parallel=2"]
TOGETHER = [
    "pools.main.devices_per_node=2",
    "pools.main.device=cpu",
    "device_sharing=always",
    "rollout.tensor_parallel=2",
]
APART = ["placement=split", "pools.actor.devices_per_node=2", "transfer=collective"]


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(num_cpus=4, include_dashboard=False, _node_ip_address="127.0.0.1", logging_level=logging.ERROR)
    yield
    ray.shutdown()


def steps(directory, *settings):
    address = f"runtime.address={ray.get_runtime_context().gcs_address}"  # a cluster with four cores on any machine
    train([*BASE, address, f"run.directory={directory}", *settings], dry_run=False)
    return [json.loads(line) for line in (directory / "r" / "metrics.jsonl").read_text().splitlines()][1:]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Function from an algorithm to the steps of the same run with backend=local on one host."""
    return {name: steps(tmp_path_factory.mktemp(name), f"algorithm={name}") for name in ("grpo", "ppo")}


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
@pytest.mark.parametrize("places", [TOGETHER, APART], ids=["one pool, by turns", "two pools"])
def test_the_engine_samples_from_the_weights_of_two_tensor_ranks(algorithm, places, alone, tmp_path):
    found = steps(tmp_path, f"algorithm={algorithm}", *MEGATRON, *places)

    # Stale weights in the engine would increase the gap, because every step changes log-probs by far more.
    assert [step["actor/rollout_logprob_gap"] for step in found] == pytest.approx([0.0] * 3, abs=1e-5)
    for step, wanted in zip(found, alone[algorithm], strict=True):
        assert step["reward/mean"] == pytest.approx(wanted["reward/mean"], abs=0.05)
        assert step["actor/loss"] == pytest.approx(wanted["actor/loss"], abs=1e-2)
