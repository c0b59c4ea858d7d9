"""Runs with schedule=async: new weights arrive while responses are generated, and groups may overtake each other."""

import json
import os
import signal
import subprocess
import sys

import pytest
import ray
from rlcore_tests.runs import metrics, small_run

from rlcore.cli.train import run as train
from rlcore.errors import ConfigError, DeadlineExceeded, HostDied, InfrastructureError, SampleError
from rlcore.rollouts.hf import HFRollout
from rlcore.testing.waiting import HANG_S, wait_until

ASYNC = ("schedule=async", "placement=split", "rollout.max_batch_size=12", "trainer.log_samples=1000")

FAULT = ("rollout.fault_after=100", "eval.every_steps=0")


def smallest_first(completion, digits):
    """Reward a response that begins well, which the untrained model often does."""
    return float(completion[:1] == min(digits))


def asynchronous(directory, *more, steps=6):
    train(small_run(directory, f"reward={__file__}:smallest_first", *ASYNC, *more, steps=steps), dry_run=False)
    return metrics(directory)


def trained_groups(directory):
    """Return the positions of all groups that were trained on, in order."""
    lines = [json.loads(line) for line in (directory / "r" / "samples.jsonl").read_text().splitlines()]
    return [line["sample_id"] // 4 for line in lines][::4]


@pytest.fixture(scope="module")
def cluster():
    """Start Ray once for all runs of this module, and return the settings of a run on it."""
    started = ray.init(num_cpus=4, include_dashboard=False, _node_ip_address="127.0.0.1", logging_level="warning")
    yield ["runtime=ray", f"runtime.address={started.address_info['gcs_address']}"]
    ray.shutdown()


def check_whole(directory, steps=6):
    """Check that each position was trained on once, within the bound on staleness."""
    assert sorted(trained_groups(directory)) == [*range(steps * 8)]
    lines = metrics(directory)[1:]
    assert [line["step"] for line in lines] == [*range(1, steps + 1)]
    assert all(0 <= line["schedule/staleness_max"] <= 4 for line in lines)


class OldVersion(HFRollout):
    """An engine that does not say which weights it got."""

    def load_weights(self, weights, version):
        super().load_weights(weights, 0)


class Picky(HFRollout):
    """An engine that refuses the requests of the third step."""

    async def generate(self, requests):
        if self._version == 2:
            raise SampleError("too hard")
        async for sample in super().generate(requests):
            yield sample


class Undeclared(HFRollout):
    """An engine that says nothing about updates in flight."""

    in_flight_updates = None


def test_local_runs_are_equal_and_mix_versions(tmp_path):
    first, second = (asynchronous(tmp_path / name) for name in ("first", "second"))

    assert first == second
    assert max(line["schedule/mixed"] for line in first[1:]) > 0
    check_whole(tmp_path / "first")


def test_a_version_beyond_the_bound_ends_the_run(tmp_path):
    with pytest.raises(
        RuntimeError, match=r"(?s)step 6 .* version 0 .* staleness of 5; .*max_staleness=4 allows .* 1 to 5"
    ):
        asynchronous(tmp_path, f"rollout={__file__}:OldVersion")


def test_an_engine_without_updates_in_flight_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"(?s)'.*Undeclared' has no in_flight_updates.*Type  schedule=pipelined"):
        asynchronous(tmp_path, f"rollout={__file__}:Undeclared")


@pytest.mark.parametrize(
    "ways", [("transfer=object_store",), ("transfer=collective", "pools.rollout.devices_per_node=2")]
)
def test_on_ray_every_group_is_trained_on_once(tmp_path, cluster, ways):
    asynchronous(tmp_path, *cluster, *ways)

    check_whole(tmp_path)


@pytest.mark.parametrize("num_steps", [2, 3])
def test_a_killed_run_is_resumed_without_losing_a_group(tmp_path, num_steps):
    settings = small_run(tmp_path, f"reward={__file__}:smallest_first", *ASYNC, "checkpoint.every_steps=2", steps=6)
    lines = tmp_path / "r" / "metrics.jsonl"
    command = [sys.executable, "-m", "rlcore", "train", *settings]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=variables) as process:
        wait_until(lambda: process.poll() is not None or (lines.exists() and lines.read_text().count("\n") > num_steps))
        assert process.poll() is None, "the run has ended"
        os.kill(process.pid, signal.SIGKILL)
        process.wait(HANG_S)

    train(settings, dry_run=False)

    check_whole(tmp_path)


def test_after_an_error_in_a_group_the_finished_groups_are_saved(tmp_path):
    with pytest.raises(SampleError, match="too hard"):
        asynchronous(tmp_path, f"rollout={__file__}:Picky")

    (checkpoint,) = (tmp_path / "r" / "checkpoints").iterdir()
    assert checkpoint.name == "step_000002"
    train(small_run(tmp_path, f"reward={__file__}:smallest_first", *ASYNC, steps=6), dry_run=False)
    check_whole(tmp_path)


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("raise", InfrastructureError, "the fake engine fails because fault=raise"),
        ("die", HostDied, "pool 'rollout' died"),
        ("hang", DeadlineExceeded, r"(?s)no response, within 20 s.*stack of rank 0.*runtime.call_timeout_s=40"),
    ],
)
def test_a_fault_of_an_engine_ends_the_run(tmp_path, cluster, fault, error, message):
    faults = ("rollout=fake", f"rollout.fault={fault}", *FAULT, "runtime.call_timeout_s=20")
    settings = [item for item in ASYNC if "max_batch" not in item]

    with pytest.raises(error, match=message):
        train(small_run(tmp_path, *settings, *cluster, *faults), dry_run=False)
