"""Runs with schedule=async that go on after one of several engines has failed."""

import logging
import os
import signal

import pytest
import ray
from rlcore_tests.runs import metrics, small_run

from rlcore import hookimpl
from rlcore.cli.train import run as train
from rlcore.controller.group import spawn
from rlcore.data.batch import Batch
from rlcore.errors import HostDied, InfrastructureError, SampleError
from rlcore.rollouts.hf import HFRollout
from rlcore.testing.fakes import FakeRollout
from rlcore.testing.waiting import wait_until
from tests.test_async import check_whole
from tests.workers import Echo

ASYNC = (
    *("schedule=async", "placement=split", "pools.rollout.devices_per_node=2"),
    *("trainer.log_samples=1000", "eval.every_steps=2", "eval.max_prompts=4"),
)
HF = ("rollout=hf", "rollout.max_batch_size=12")
FAKE = f"rollout={__file__}:OneFails"


@pytest.fixture(scope="module")
def cluster():
    """Start Ray once for all runs of this module, and return the settings of a run on it."""
    started = ray.init(num_cpus=4, include_dashboard=False, _node_ip_address="127.0.0.1", logging_level="warning")
    yield ["runtime=ray", f"runtime.address={started.address_info['gcs_address']}"]
    ray.shutdown()


class OneFails(FakeRollout):
    """Engines of which all but the first have the fault."""

    def __init__(self, config, *, model, context):
        super().__init__(config, model=model, context=context)
        self.is_healthy = context.rank == 0

    async def _go_wrong(self):
        if not self.is_healthy:
            await super()._go_wrong()


class LastFails(OneFails):
    """Engines of which the third has the fault."""

    def __init__(self, config, *, model, context):
        super().__init__(config, model=model, context=context)
        self.is_healthy = context.rank != 2


class OneGetsBadData(OneFails):
    """Engines of which one cannot process a sample."""

    async def _go_wrong(self):
        if not self.is_healthy and self._num_begun == 40:
            raise SampleError("too hard")


class OneCannotLoad(HFRollout):
    """Engines of which one fails in the middle of the third update."""

    def __init__(self, config, *, model, context):
        super().__init__(config, model=model, context=context)
        self.is_healthy = context.rank == 0

    def load_weights(self, weights, version):
        if version == 3 and not self.is_healthy:
            next(weights)
            raise InfrastructureError("no memory for the weights")
        super().load_weights(weights, version)


class OneCannotEvaluate(OneFails):
    """Engines of which one fails at greedy requests of the weights of version 2."""

    async def generate(self, requests):
        if not self.is_healthy and self.version == 2 and requests[0].sampling.temperature == 0:
            raise InfrastructureError("no greedy sampling today")
        async for sample in super().generate(requests):
            yield sample


class Ends:
    """A hook that sends a signal to the host of the second engine in the third step."""

    number, phase = signal.SIGKILL, "step_start"

    @hookimpl
    def rlcore_run_start(self, run):
        echo = spawn(Echo, run.runtime, role="echo", pool="rollout")
        self.pids = echo.pid()
        self.column = echo.echo(Batch.of(lengths=[1] * len(self.pids), tokens={"input_ids": [0] * len(self.pids)}))

    @hookimpl
    def rlcore_step_start(self, run, step):
        self._end("step_start", step)

    @hookimpl
    def rlcore_samples_scored(self, run, step, samples):
        self._end("samples_scored", step)

    def _end(self, phase, step):
        if (phase, step) == (self.phase, 3):
            os.kill(self.pids[1], self.number)
            if self.number == signal.SIGKILL:
                wait_until(self._has_lost_columns)

    def _has_lost_columns(self):
        """Return whether Ray has noticed that the owner of a column is gone, which takes a few seconds."""
        try:
            self.column.fetch("input_ids")
        except HostDied:
            return True
        return False


class EndsBeforeTheUpdate(Ends):
    phase = "samples_scored"


class Stops(Ends):
    number = signal.SIGSTOP
    stopped = None

    def _end(self, phase, step):
        super()._end(phase, step)
        Stops.stopped = self.pids[1]

    @classmethod
    def is_alive(cls):
        return os.path.exists(f"/proc/{cls.stopped}")


def run_with(directory, *more, steps=4):
    train(small_run(directory, *ASYNC, *more, steps=steps), dry_run=False)
    check_whole(directory, steps)
    return metrics(directory)[1:]


def num_again(lines):
    return [line["schedule/requested_again"] for line in lines]


def largest_gap(lines):
    """Return the largest difference of log-probs in steps with samples of the newest weights."""
    return max(line["actor/rollout_logprob_gap"] for line in lines if "actor/rollout_logprob_gap" in line)


def failures(caplog):
    """Return the warnings about engines that failed."""
    return [it.message for it in caplog.records if it.levelno == logging.WARNING and "is left out" in it.message]


@pytest.mark.parametrize(("way", "hook"), [("object_store", "Ends"), ("collective", "EndsBeforeTheUpdate")])
def test_a_killed_engine_is_left_out(tmp_path, cluster, caplog, way, hook):
    lines = run_with(tmp_path, *cluster, *HF, f"plugins.hooks=['{__file__}:{hook}']", f"transfer={way}")

    assert sum(num_again(lines)) > 0 == sum(num_again(lines[:2]))
    assert largest_gap(lines) < 1e-4
    (warning,) = failures(caplog)
    assert warning.startswith("engine 1 of pool 'rollout' failed and is left out, 1 remain: ")
    assert "the host of rank 1 of pool 'rollout' died" in warning


def test_engines_that_hang_are_left_out(tmp_path, cluster, caplog):
    """The engine of one host generates nothing more, and the process of another one is stopped."""
    stops = ("pools.rollout.devices_per_node=3", f"plugins.hooks=['{__file__}:Stops']")
    hangs = (f"rollout={__file__}:LastFails", "rollout.fault=hang", "rollout.fault_after=10")
    lines = run_with(tmp_path, *cluster, *stops, *hangs, "eval.every_steps=0", "runtime.call_timeout_s=10")

    assert sum(num_again(lines)) > 0
    reasons = {it.split()[1]: it.partition("remain: ")[2] for it in failures(caplog)}
    assert reasons.keys() == {"1", "2"}
    assert "did not finish within 10 s" in reasons["1"]
    assert "engine 2 of pool 'rollout' finished none of" in reasons["2"]
    assert not Stops.is_alive(), "the stopped process is left behind"


def test_in_one_process_an_engine_that_raises_is_left_out(tmp_path, caplog):
    more = (FAKE, "rollout.fault=raise", "rollout.fault_after=40")
    lines = run_with(tmp_path / "first", *more)

    assert lines == run_with(tmp_path / "second", *more)
    assert sum(num_again(lines)) > 0
    assert len(failures(caplog)) == 2


def test_an_engine_that_cannot_load_the_weights_is_left_out(tmp_path, caplog):
    lines = run_with(tmp_path, f"rollout={__file__}:OneCannotLoad", HF[1])

    assert sum(num_again(lines[:3])) == 0 < sum(num_again(lines))
    assert largest_gap(lines) < 1e-4
    assert [it.partition("remain: ")[2] for it in failures(caplog)] == ["no memory for the weights"]


def test_an_evaluation_goes_on_without_the_engine_that_failed(tmp_path, caplog):
    run_with(tmp_path / "whole", "eval.every_steps=1", "rollout=fake")
    lines = run_with(tmp_path / "failed", "eval.every_steps=1", f"rollout={__file__}:OneCannotEvaluate")

    assert len(failures(caplog)) == 1
    assert [it["eval/reward"] for it in lines] == [it["eval/reward"] for it in metrics(tmp_path / "whole")[1:]]


def test_an_error_in_the_data_ends_the_run(tmp_path, caplog):
    with pytest.raises(SampleError, match="too hard"):
        run_with(tmp_path, f"rollout={__file__}:OneGetsBadData")

    assert failures(caplog) == []


@pytest.mark.parametrize(("limit", "number", "left_out"), [(1, 3, 1), (8, 2, 1), (0, 2, 0)])
def test_too_many_failures_end_the_run(tmp_path, caplog, limit, number, left_out):
    """With three engines, the second failure is one too many; with two, a fault of both leaves none."""
    engine = FAKE if number == 3 else "rollout=fake"
    more = (f"pools.rollout.devices_per_node={number}", f"schedule.max_engine_failures={limit}")

    with pytest.raises(InfrastructureError, match="the fake engine fails because fault=raise") as raised:
        run_with(tmp_path, *more, engine, "rollout.fault=raise", "rollout.fault_after=40")

    assert len(failures(caplog)) == left_out
    note = f"1 other engines of pool 'rollout' failed before; schedule.max_engine_failures={limit}"
    assert (note in raised.value.__notes__) == bool(left_out)
