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
from rlcore.controller.host import Reply
from rlcore.controller.make import make_runtime
from rlcore.controller.members import Members
from rlcore.controller.pool import PoolConfig, RuntimeConfig
from rlcore.controller.ref import BatchRef
from rlcore.data.batch import Batch
from rlcore.errors import DeadlineExceeded, HostDied, InfrastructureError, SampleError
from rlcore.protocols.dispatch import Call
from rlcore.rollouts.hf import HFRollout
from rlcore.testing.fakes import FakeRollout, FakeStore
from rlcore.testing.waiting import wait_until
from rlcore.types import Mesh
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


class OneDiesLoading(OneCannotLoad):
    """Engines of which the process of one is killed in the middle of the third update."""

    def load_weights(self, weights, version):
        if version == 3 and not self.is_healthy:
            next(weights)
            os.kill(os.getpid(), signal.SIGKILL)
        super().load_weights(weights, version)


class OneCannotEvaluate(OneFails):
    """Engines of which one fails at greedy requests of the weights of version 2."""

    async def generate(self, requests):
        if not self.is_healthy and self.version == 2 and requests[0].sampling.temperature == 0:
            raise InfrastructureError("no greedy sampling today")
        async for sample in super().generate(requests):
            yield sample


TIMEOUT_S = 10.0


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


class Copies:
    """A runtime whose calls reply at once, and whose copies on a trainer's host end as given."""

    inline = False
    config = RuntimeConfig()

    def __init__(self, batch, *outcomes):
        self._replies = [[Reply(value=batch, seconds=0.0)] * len(outcomes), list(outcomes)]

    def wait_each(self, handles, what, timeout_s, interrupt=None):
        return self._replies.pop(0)

    def pool_size(self, pool):
        return 1

    def submit(self, pool, rank, action, *args):
        assert (pool, action) == ("actor", "keep")
        return object()

    def end_host(self, pool, rank):
        assert (pool, rank) == ("rollout", 1)


def members_of(runtime):
    meshes = [Mesh(rank=rank, world_size=2, dp_rank=rank, dp_size=2) for rank in range(2)]
    members = Members(runtime, "rollout", "rollout", meshes)
    members.tolerate(1, keeper="actor")
    return members


def test_only_the_engine_whose_samples_are_lost_is_left_out():
    batch = BatchRef.publish(Batch.of(lengths=[1], tokens={"input_ids": [5]}), FakeStore())
    copied = Reply(value="copied", seconds=0.0)
    members = members_of(Copies(batch, copied, InfrastructureError("lost")))

    replies = members.wait({0: object(), 1: object()}, "rollout.generate")

    assert {rank: reply.value for rank, reply in replies.items()} == {0: "copied"}
    assert members.ranks == [0]


@pytest.mark.parametrize("error", [HostDied("the actor's host"), DeadlineExceeded("the actor's host")])
def test_a_trainer_that_fails_to_copy_is_not_a_failure_of_the_engine(error):
    batch = BatchRef.publish(Batch.of(lengths=[1], tokens={"input_ids": [5]}), FakeStore())
    members = members_of(Copies(batch, Reply(value="copied", seconds=0.0), error))

    with pytest.raises(type(error), match="the actor's host"):
        members.wait({0: object(), 1: object()}, "rollout.generate")

    assert list(members.ranks) == [0, 1]


def test_engines_that_hang_at_the_same_time_cost_one_time_out(cluster, caplog):
    config = RuntimeConfig(name="ray", address=cluster[1].partition("=")[2], call_timeout_s=TIMEOUT_S)
    runtime = make_runtime(config)
    try:
        runtime.start({"rollout": PoolConfig(devices_per_node=3, device="cpu")}, {})
        echo = spawn(Echo, runtime, role="echo", pool="rollout")
        echo.members.tolerate(2, keeper="rollout")

        seconds = [0.0, 6 * TIMEOUT_S, 1.2 * TIMEOUT_S]  # the last one returns long before a second time-out
        call = Call((seconds,), {})
        naps = {rank: runtime.submit("rollout", rank, "call", "echo", "nap", call) for rank in range(3)}

        assert echo.members.wait(naps, "echo.nap").keys() == {0}

        assert echo.ranks == [0]
        assert all(f"echo.nap did not finish within {TIMEOUT_S:g} s" in it for it in failures(caplog))
        assert echo.who("I am") == ["I am 0 of 3"]
    finally:
        runtime.shutdown()


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


def test_an_engine_that_is_killed_during_an_update_is_left_out(tmp_path, cluster, caplog):
    lines = run_with(tmp_path, *cluster, f"rollout={__file__}:OneDiesLoading", HF[1], "transfer=object_store")

    assert sum(num_again(lines[:3])) == 0 < sum(num_again(lines))
    assert largest_gap(lines) < 1e-4
    (warning,) = failures(caplog)
    assert "weight sync: the host of rank 1 of pool 'rollout' died" in warning


def test_an_engine_that_cannot_load_a_broadcast_is_left_out(tmp_path, cluster, caplog):
    lines = run_with(tmp_path, *cluster, f"rollout={__file__}:OneCannotLoad", HF[1], "transfer=collective")

    assert sum(num_again(lines[:3])) == 0 < sum(num_again(lines))
    assert largest_gap(lines) < 1e-4
    assert [it.partition("remain: ")[2] for it in failures(caplog)] == ["no memory for the weights"]


def test_an_engine_that_is_killed_during_a_broadcast_ends_the_run(tmp_path, cluster, caplog):
    with pytest.raises(HostDied, match="weight sync: the host of rank 1 of pool 'rollout' died") as raised:
        run_with(tmp_path, *cluster, f"rollout={__file__}:OneDiesLoading", HF[1], "transfer=collective")

    assert any("type  transfer=object_store" in note for note in raised.value.__notes__)
    assert failures(caplog) == []


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
