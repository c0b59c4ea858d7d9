"""Runs with schedule=pipelined: the samples of the next step are generated while this step trains."""

import asyncio
import os
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray
from rlcore_tests.runs import metrics, small_run
from rlcore_tests.window import NO_STEPS_AHEAD, without_schedule

from rlcore import hookimpl
from rlcore.algorithms.grpo import GRPO
from rlcore.cli.train import run as train
from rlcore.data.recorded import open_batch
from rlcore.rollouts.hf import HFConfig, HFRollout
from rlcore.testing.waiting import HANG_S

FAULTS = Path(__file__).with_name("faults.py")
PIPELINED = ("schedule=pipelined", "placement=split")


def smallest_first(completion, digits):
    """Reward responses with a correct first digit, which the untrained model often writes."""
    return float(completion[:1] == min(digits))


def pipelined(directory, *more, steps=4):
    train(small_run(directory, f"reward={__file__}:smallest_first", *PIPELINED, *more, steps=steps), dry_run=False)
    return metrics(directory)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Metrics of an uninterrupted run in one process."""
    return pipelined(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def cluster():
    """Start Ray once for all runs of this module, and return the settings of a run on it."""
    started = ray.init(num_cpus=4, include_dashboard=False, _node_ip_address="127.0.0.1", logging_level="warning")
    yield ["runtime=ray", f"runtime.address={started.address_info['gcs_address']}"]
    ray.shutdown()


class Copies:
    """A hook that copies the run's directory during every step, as a kill at this moment would leave it."""

    @hookimpl
    def rlcore_step_end(self, run, step, metrics):
        shutil.copytree(run.directory, run.directory.parent.parent / f"killed_{step}" / "r")


class Stops:
    """A hook that sends a signal in the step of the environment variable."""

    @hookimpl
    def rlcore_step_start(self, run, step):
        if step == int(os.environ.get("RLCORE_TEST_STOP", "0")):
            os.kill(os.getpid(), signal.SIGTERM)


class Raises:
    """A hook that fails in the third step, before the update."""

    @hookimpl
    def rlcore_samples_scored(self, run, step, samples):
        if step == 3:
            raise RuntimeError("the third step has no rewards")


@dataclass(frozen=True, slots=True, kw_only=True)
class HangsConfig(HFConfig):
    version: int = -1
    """Version of the weights that generates nothing."""


class Hangs(HFRollout):
    """An engine that never finishes with weights of one version."""

    Config = HangsConfig

    async def generate(self, requests):
        if self._version == self._config.version:
            await asyncio.sleep(HANG_S)
        async for sample in super().generate(requests):
            yield sample


class Refills(GRPO):
    """An algorithm that takes three more prompts in every step."""

    def draw(self, roles, prompts):
        samples = super().draw(roles, prompts)
        return samples.cat([samples, super().draw(roles, roles.more_prompts(3))])


class OldVersion(HFRollout):
    """Engine that does not report versions of weights."""

    def load_weights(self, weights, version):
        super().load_weights(weights, 0)


def test_samples_are_one_step_old_after_the_first_step(whole):
    assert [line["schedule/staleness_mean"] for line in whole[1:]] == [0, 1, 1, 1]
    assert [line["schedule/staleness_max"] for line in whole[1:]] == [0, 1, 1, 1]
    assert [line["schedule/staleness_share_1"] for line in whole[1:]] == [0, 1, 1, 1]
    assert [line["schedule/last_token_staleness_mean"] for line in whole[1:]] == [0, 1, 1, 1]
    assert [line["schedule/mixed"] for line in whole[1:]] == [0, 0, 0, 0]
    assert [line["schedule/overtaken"] for line in whole[1:]] == [0, 0, 0, 0]
    assert [line["progress/samples"] for line in whole[1:]] == [32, 64, 96, 128]


def test_the_first_step_is_that_of_a_run_without_steps_ahead(tmp_path, whole):
    sync = pipelined(tmp_path, "schedule=sync")

    assert not [name for line in sync for name in line if name.startswith("schedule/")]
    assert {name: value for name, value in whole[1].items() if not name.startswith("schedule/")} == sync[1]
    assert whole[3]["actor/grad_norm"] != sync[3]["actor/grad_norm"] > 0


@pytest.mark.parametrize("algorithm", ["grpo", "ppo", f"{__file__}:Refills"])
def test_without_steps_ahead_the_results_are_those_of_sync(tmp_path, algorithm):
    more = ("schedule=sync", f"algorithm={algorithm}")
    sync, window = pipelined(tmp_path / "sync", *more), pipelined(tmp_path / "window", *more, NO_STEPS_AHEAD)

    assert without_schedule(window) == sync
    assert [line["schedule/staleness_max"] for line in window[1:]] == [0, 0, 0, 0]
    assert sync[-1]["actor/grad_norm"] > 0
    assert ("critic/loss" in sync[-1]) == (algorithm == "ppo")


def test_the_same_run_on_ray_gives_the_same_results(tmp_path, cluster, whole):
    assert pipelined(tmp_path, *cluster) == whole


def test_two_engines_give_the_same_results_on_both_runtimes(tmp_path, cluster):
    engines = "pools.rollout.devices_per_node=2"

    assert pipelined(tmp_path / "ray", *cluster, engines) == pipelined(tmp_path / "local", engines)


@pytest.mark.parametrize("order", ["reversed", "shortest"])
def test_the_order_in_which_responses_finish_does_not_matter(tmp_path, order):
    one, other = (
        pipelined(tmp_path / name, "rollout=fake", f"rollout.order={name}", "rollout.fault=late")
        for name in ("asked", order)
    )

    assert one == other


def test_a_version_beyond_the_bound_ends_the_run(tmp_path):
    with pytest.raises(
        RuntimeError, match=r"(?s)step 3 .* version 0 .* staleness of 2; .*max_staleness=1 allows .* 1 to 2"
    ):
        pipelined(tmp_path, f"rollout={__file__}:OldVersion")

    assert [path.name for path in (tmp_path / "r" / "checkpoints").iterdir()] == ["step_000002"]


def test_a_killed_run_resumes_with_the_same_results(tmp_path):
    """The checkpoint of step 2 is half written until step 3 ends, and that of step 4 until step 5 ends."""
    more = ["checkpoint.every_steps=2", f"backend={FAULTS}:WritesLater"]
    whole = pipelined(tmp_path / "whole", *more, f"plugins.hooks=['{__file__}:Copies']", steps=6)

    for step in range(2, 6):
        killed = tmp_path / f"killed_{step}"
        names = sorted(path.name for path in (killed / "r" / "checkpoints").glob("*"))
        assert (
            names == [[], [".step_000002.writing"], ["step_000002"], [".step_000004.writing", "step_000002"]][step - 2]
        )
        assert pipelined(killed, *more, steps=6) == whole


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_a_run_that_is_stopped_resumes_with_the_same_results(tmp_path, monkeypatch, whole, step):
    monkeypatch.setenv("RLCORE_TEST_STOP", str(step))
    assert len(pipelined(tmp_path, f"plugins.hooks=['{__file__}:Stops']")) == 1 + step

    queue = tmp_path / "r" / "checkpoints" / f"step_{step:06d}" / "queue"
    assert queue.is_dir() == (step < 4), "the last step requests nothing ahead"
    if step < 4:
        assert open_batch(queue)["group_id"].unique().tolist() == list(range(8 * step, 8 * step + 8))
        assert "digits" not in open_batch(queue)

    assert pipelined(tmp_path) == whole


def test_an_error_before_the_update_loses_no_samples(tmp_path, whole):
    with pytest.raises(RuntimeError, match="the third step has no rewards"):
        pipelined(tmp_path, f"plugins.hooks=['{__file__}:Raises']")

    queue = open_batch(tmp_path / "r" / "checkpoints" / "step_000002" / "queue")
    assert queue["group_id"].unique().tolist() == list(range(16, 24)), "the samples of step 3"
    assert queue["deadline_step"].unique().tolist() == [3]
    assert pipelined(tmp_path) == whole


def test_a_signal_abandons_a_step_that_waits_for_samples(tmp_path, monkeypatch, cluster):
    """Step 2 takes finished samples, and then waits for more, which version 1 never finishes."""
    refills = [*cluster, f"algorithm={__file__}:Refills", f"rollout={__file__}:Hangs"]
    monkeypatch.setenv("RLCORE_TEST_STOP", "2")
    stops = f"plugins.hooks=['{__file__}:Stops']"
    assert len(pipelined(tmp_path / "cut", *refills, stops, "rollout.version=1")) == 2

    queue = open_batch(tmp_path / "cut" / "r" / "checkpoints" / "step_000001" / "queue")
    assert queue["group_id"].unique().tolist() == list(range(11, 19)), "the prompts of step 2, before it took more"
    resumed = pipelined(tmp_path / "cut", *refills)
    assert resumed == pipelined(tmp_path / "whole", *refills[2:])
    assert [line["progress/samples"] for line in resumed[1:]] == [44, 88, 132, 176]
    assert [line["schedule/staleness_mean"] for line in resumed[1:]] == pytest.approx([0, 8 / 11, 8 / 11, 8 / 11])
