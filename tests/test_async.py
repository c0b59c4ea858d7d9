"""Runs with schedule=async: new weights arrive while responses are generated, and groups may overtake each other."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass

import pytest
import ray
from rlcore_tests.runs import metrics, small_run

from rlcore import hookimpl
from rlcore.cli import main
from rlcore.cli.train import run as train
from rlcore.controller.runtime import LocalRuntime
from rlcore.data.recorded import open_batch
from rlcore.errors import ConfigError, DeadlineExceeded, HostDied, InfrastructureError, RlcoreError, SampleError
from rlcore.rollouts.hf import HFConfig, HFRollout
from rlcore.testing.fakes import FakeRollout
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


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultyConfig(HFConfig):
    faulty: bool = False


class Stuck(HFRollout):
    """An engine that never finishes the first two groups that it gets with version 1 of the weights."""

    Config = FaultyConfig
    num_stuck = 0

    async def generate(self, requests):
        if self._version == 1 and self.num_stuck < 2 and self._config.faulty:
            self.num_stuck += 1
            await asyncio.sleep(2 * HANG_S)
        async for sample in super().generate(requests):
            yield sample


class Stops:
    """A hook that sends SIGTERM one second after the step of the environment variable has begun."""

    @hookimpl
    def rlcore_step_start(self, run, step):
        if step == int(os.environ.get("RLCORE_TEST_STOP", "0")):
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()


class StopsAtOnce:
    """A hook that sends SIGTERM at the start of the step of the environment variable."""

    @hookimpl
    def rlcore_step_start(self, run, step):
        if step == int(os.environ.get("RLCORE_TEST_STOP", "0")):
            os.kill(os.getpid(), signal.SIGTERM)


class Incomplete(HFRollout):
    """An engine whose second rank gets only one parameter of version 3."""

    Config = FaultyConfig

    def load_weights(self, weights, version):
        if self._config.faulty and self.mesh.rank == 1 and version == 3:
            weights = iter([next(weights)])
        super().load_weights(weights, version)


def length(num_tokens):
    return float(num_tokens)


class Counts(HFRollout):
    """An engine that writes the length of each response to the file of the environment variable, and delays some."""

    num_groups = 0

    async def generate(self, requests):
        self.num_groups += 1
        for _ in range(60 if self.num_groups % 8 == 2 else 0):
            await asyncio.sleep(0)  # a step of the responses of other groups
        async for sample in super().generate(requests):
            with open(os.environ["RLCORE_TEST_LENGTHS"], "a") as file:
                file.write(f"{len(sample.token_ids)}\n")
            yield sample


LATE_S = 2.0
"""Longer than a step of the trainer on a busy machine."""


class OneLate(FakeRollout):
    """An engine that answers every eighth group after LATE_S seconds, and the others at once."""

    num_groups = 0

    async def generate(self, requests):
        self.num_groups += 1
        if self.num_groups % 8 == 1:
            await asyncio.sleep(LATE_S)
        async for sample in super().generate(requests):
            yield sample


SLOW_S = 27


class Slow(FakeRollout):
    """An engine whose first group gets one token per second, SLOW_S in all."""

    is_first = True

    async def generate(self, requests):
        if self.is_first:
            self.is_first = False
            for _ in range(SLOW_S):
                await asyncio.sleep(1.0)
                self.num_tokens += 1
        async for sample in super().generate(requests):
            yield sample


def third_fails(completion, sample_id):
    """Raise for one sample of the third step."""
    if sample_id == 4 * 17 and "RLCORE_TEST_STOP" in os.environ:
        raise ValueError("this one cannot be scored")
    return float(sample_id % 3)


class Undeclared(HFRollout):
    """An engine that says nothing about updates in flight."""

    in_flight_updates = None


def test_local_runs_are_equal_and_mix_versions(tmp_path):
    first, second = (asynchronous(tmp_path / name) for name in ("first", "second"))

    assert first == second
    assert max(line["schedule/mixed"] for line in first[1:]) > 0
    check_whole(tmp_path / "first")


def test_two_steps_ahead_are_the_mean_staleness(tmp_path):
    lines = asynchronous(tmp_path, "schedule.steps_ahead=2", steps=8)

    check_whole(tmp_path, steps=8)
    assert [line["schedule/staleness_max"] for line in lines[1:3]] == [0, 1]
    means = [line["schedule/staleness_mean"] for line in lines[3:]]
    assert max(means) == 2 and sum(means) / len(means) > 1, "with runtime=local, engines begin when a step waits"
    assert [line["schedule/open"] + line["schedule/finished"] for line in lines[1:]] == [16] * 6 + [8, 0]


def test_every_response_that_is_generated_is_trained_on(tmp_path, monkeypatch):
    """Nothing is dropped because it is long or late."""
    monkeypatch.setenv("RLCORE_TEST_LENGTHS", str(tmp_path / "lengths"))
    settings = (f"rollout={__file__}:Counts", f"reward={__file__}:length", "data.eval=")
    train(small_run(tmp_path, *ASYNC, *settings, steps=6), dry_run=False)

    generated = [float(line) for line in (tmp_path / "lengths").read_text().split()]
    lines = [json.loads(line) for line in (tmp_path / "r" / "samples.jsonl").read_text().splitlines()]
    assert sorted(line["reward"] for line in lines) == sorted(generated)
    assert len(set(generated)) > 2, "all responses have the same length"
    assert max(line["schedule/overtaken"] for line in metrics(tmp_path)[1:]) > 0


def test_a_version_beyond_the_bound_ends_the_run(tmp_path):
    with pytest.raises(
        RuntimeError,
        match=r"(?s)step 6 .* version 0 .* staleness of 5; .*max_staleness=4 allows .* 1 to 5"
        r".*\nTest the engine:  rlcore check rollout \S*test_async.py:OldVersion",
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


def test_after_a_reward_that_fails_the_run_resumes(tmp_path, monkeypatch):
    settings = small_run(tmp_path, f"reward={__file__}:third_fails", *ASYNC, steps=6)
    monkeypatch.setenv("RLCORE_TEST_STOP", "")
    with pytest.raises(RlcoreError, match="this one cannot be scored"):
        train(settings, dry_run=False)
    stopped = metrics(tmp_path)[-1]["step"]
    (checkpoint,) = (tmp_path / "r" / "checkpoints").iterdir()
    assert (checkpoint / "queue").is_dir()
    assert checkpoint.name == f"step_{stopped:06d}" != "step_000006"

    monkeypatch.delenv("RLCORE_TEST_STOP")
    train(settings, dry_run=False)
    check_whole(tmp_path)


@pytest.mark.parametrize("step", [1, 3, 6])
def test_a_run_that_is_stopped_in_a_step_resumes_without_losing_a_group(tmp_path, monkeypatch, step):
    monkeypatch.setenv("RLCORE_TEST_STOP", str(step))
    stopped = len(asynchronous(tmp_path, f"plugins.hooks=['{__file__}:StopsAtOnce']")) - 1
    assert stopped in (step - 1, step)

    monkeypatch.delenv("RLCORE_TEST_STOP")
    asynchronous(tmp_path)
    check_whole(tmp_path)


def test_a_signal_does_not_wait_for_the_slowest_response(tmp_path, monkeypatch, cluster):
    """In step 6, two groups that the second step requested are due; the other six of the last step are finished."""
    more = (f"reward={__file__}:smallest_first", f"rollout={__file__}:Stuck", "data.eval=")
    settings = small_run(tmp_path, *ASYNC, *cluster, *more, steps=6)
    monkeypatch.setenv("RLCORE_TEST_STOP", "6")
    begin = time.monotonic()

    faulty = small_run(tmp_path, *settings, "rollout.faulty=true", f"plugins.hooks=['{__file__}:Stops']", steps=6)
    assert main(["train", *faulty]) == 0

    assert time.monotonic() - begin < HANG_S
    (checkpoint,) = (tmp_path / "r" / "checkpoints").iterdir()
    assert checkpoint.name == "step_000005"
    assert len(open_batch(checkpoint / "queue")["group_id"].unique()) == 6
    assert main(["train", *settings]) == 0
    check_whole(tmp_path)


def test_after_an_update_that_fails_on_one_of_two_engines_the_run_resumes(tmp_path, cluster):
    two = ("pools.rollout.devices_per_node=2", f"rollout={__file__}:Incomplete", "checkpoint.every_steps=1")
    with pytest.raises(RlcoreError, match=r"weight"):
        asynchronous(tmp_path, *cluster, *two, "rollout.faulty=true", "schedule.max_engine_failures=0")
    assert sorted(path.name for path in (tmp_path / "r" / "checkpoints").iterdir())[-1] == "step_000002"

    asynchronous(tmp_path, *cluster, *two)
    check_whole(tmp_path)


def test_late_responses_delay_no_other_ones(tmp_path, cluster):
    """If each step waited for its late response, no group would be overtaken."""
    settings = [item for item in ASYNC if "max_batch" not in item]
    settings += [f"reward={__file__}:smallest_first", f"rollout={__file__}:OneLate", "data.eval="]
    train(small_run(tmp_path, *settings, *cluster, steps=8), dry_run=False)

    lines = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    assert sum(line.get("schedule/overtaken", 0.0) for line in lines) > 0
    check_whole(tmp_path, steps=8)


def test_a_response_may_take_longer_than_a_call_while_it_gets_tokens(tmp_path, cluster):
    settings = [item for item in ASYNC if "max_batch" not in item]
    settings += [f"rollout={__file__}:Slow", "data.eval=", "runtime.call_timeout_s=20"]

    train(small_run(tmp_path, *settings, *cluster, steps=2), dry_run=False)

    assert metrics(tmp_path)[-1]["step"] == 2
    check_whole(tmp_path, steps=2)


def calls_of(directory, monkeypatch, *settings):
    """Return how often each method of the rollout was called, on any rank, in a run of six steps."""
    submit, calls = LocalRuntime.submit, Counter()

    def counting(self, pool, rank, action, *args):
        if action in ("call", "poll") and args[0] == "rollout":
            calls[args[1]] += 1
        return submit(self, pool, rank, action, *args)

    monkeypatch.setattr(LocalRuntime, "submit", counting)
    train(small_run(directory, "data.eval=", "placement=split", *settings, steps=6), dry_run=False)
    monkeypatch.undo()
    return dict(calls)


def test_a_schedule_adds_at_most_two_calls_for_each_engine_and_step(tmp_path, monkeypatch):
    engines = ("pools.rollout.devices_per_node=2", "rollout.max_batch_size=4")
    sync, pipelined, ahead = (
        calls_of(tmp_path / name, monkeypatch, f"schedule={name}", *engines) for name in ("sync", "pipelined", "async")
    )

    assert sync == pipelined == {"generate": 2 * 6}
    assert ahead["request_groups"] <= 2 * 6
    assert ahead["finished_groups"] <= 2 * (6 + 2), "one in each step, and two at the checkpoint"
    assert set(ahead) == {"request_groups", "finished_groups"}
