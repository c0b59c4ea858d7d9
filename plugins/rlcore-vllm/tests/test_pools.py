"""Models sharded over two ranks with engines of other sizes, in one pool and in two, with every weight-transfer method."""

import json
import logging

import pytest
import ray

from rlcore.cli.train import run as train

pytestmark = pytest.mark.slow
pytest.importorskip("rlcore_fsdp", reason="pip install rlcore-fsdp: its shards are what is gathered here")
COMMON = ["model.path=quickstart:model", "data.train=quickstart:train", "reward=sorted_digits", "trackers=jsonl"]
COMMON += ["trainer.steps=3", "trainer.prompts_per_step=16", "sampling.samples_per_prompt=4", "optimizer.lr=3e-4"]
COMMON += ["sampling.max_response_tokens=8", "run.name=run", "rollout=vllm", "rollout.max_batch_size=64"]
TWO = ["backend=fsdp", "runtime=ray"]
TOGETHER = [*TWO, "pools.main.devices_per_node=2", "pools.main.device=cpu"]
APART = [*TWO, "placement=split", "pools.actor.devices_per_node=2", "pools.rollout.devices_per_node=2"]


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(num_cpus=4, include_dashboard=False, _node_ip_address="127.0.0.1", logging_level=logging.ERROR)
    yield
    ray.shutdown()


def steps(directory, *settings):
    address = (
        f"runtime.address={ray.get_runtime_context().gcs_address}"  # a cluster of four cores, whatever the machine has
    )
    train([*COMMON, address, f"run.directory={directory}", *settings], dry_run=False)
    return [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()][1:]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Metrics of the same run on one rank with the local backend."""
    return steps(tmp_path_factory.mktemp("alone"), "runtime=ray")


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(
            [*TOGETHER, "rollout.tensor_parallel=2", "device_sharing=always"], id="one pool, one engine, shared devices"
        ),
        pytest.param(
            [*TOGETHER, "rollout.tensor_parallel=1", "device_sharing=always"],
            id="one pool, two engines, shared devices",
        ),
        pytest.param([*APART, "rollout.tensor_parallel=2", "transfer=collective"], id="two pools, one engine"),
        pytest.param([*APART, "rollout.tensor_parallel=1", "transfer=collective"], id="two pools, two engines"),
        pytest.param([*APART, "rollout.tensor_parallel=2", "transfer=object_store"], id="two pools, through the store"),
    ],
)
def test_two_ranks_train_the_same_with_any_division_of_engines(settings, alone, tmp_path):
    found = steps(tmp_path, *settings)

    # Old weights in any part of an engine would show in the gap, as every step changes log-probs by far more.
    assert [step["actor/rollout_logprob_gap"] for step in found] == pytest.approx([0.0] * 3, abs=1e-5)
    for step, wanted in zip(found, alone, strict=True):
        assert step["reward/mean"] == pytest.approx(wanted["reward/mean"], abs=0.05)
        assert step["actor/loss"] == pytest.approx(wanted["actor/loss"], abs=1e-2)
    assert all(("memory_gb/after_to_rollout" in step) == ("device_sharing=always" in settings) for step in found)


@pytest.mark.parametrize(
    "division",
    [pytest.param([*TOGETHER, "rollout.tensor_parallel=2"], id="one pool"), pytest.param(APART, id="two pools")],
)
def test_runs_with_adapter_only_updates_equal_runs_with_merged_weights(division, tmp_path):
    pytest.importorskip("peft", reason="pip install 'rlcore-fsdp[lora]'")
    lora = [*division, "backend.lora_rank=6", "backend.lora_alpha=12"]
    wanted = steps(tmp_path / "merged", *lora)
    found = steps(tmp_path / "alone", *lora, "backend.lora_sync=adapters", "rollout.lora_rank=6")

    assert [step["actor/rollout_logprob_gap"] for step in found] == pytest.approx([0.0] * 3, abs=1e-5)
    for step, other in zip(found, wanted, strict=True):
        assert step["reward/mean"] == pytest.approx(other["reward/mean"], abs=0.05)
        assert step["actor/loss"] == pytest.approx(other["actor/loss"], abs=1e-2)
