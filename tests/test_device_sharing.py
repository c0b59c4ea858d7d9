"""Device sharing of rollout and models: the order of offloading, and equal results with and without it."""

import json

import pytest
from rlcore_tests.runs import metrics, small_run

from rlcore.backends.local import LocalBackend, LocalConfig
from rlcore.cli.train import run as train
from rlcore.controller.dispatch import dispatch
from rlcore.controller.group import spawn
from rlcore.controller.pool import PoolConfig, RuntimeConfig
from rlcore.controller.record import Record
from rlcore.controller.runtime import LocalRuntime
from rlcore.rollouts.hf import HFConfig, HFRollout
from rlcore.trainer.sharing import DeviceSharing
from rlcore.workers.base import Worker

LOG = []


class Model(Worker):
    """Worker that logs its calls; two of them share a pool with an engine."""

    @dispatch("all", on_device=False)
    def offload(self):
        LOG.append(f"{self.context.role} leaves")

    @dispatch("all", on_device=False)
    def reload(self):
        LOG.append(f"{self.context.role} comes")

    @dispatch("all")
    def learn(self):
        LOG.append(f"{self.context.role} learns")

    @dispatch("all", on_device=False)
    def look(self):
        LOG.append(f"{self.context.role} looks")


class Engine(Worker):
    @dispatch("all", on_device=False)
    def pause(self):
        LOG.append(f"{self.context.role} pauses")
        return 3

    @dispatch("all", on_device=False)
    def resume(self):
        LOG.append(f"{self.context.role} resumes")

    @dispatch("all", on_device=False)
    def sleep(self):
        LOG.append(f"{self.context.role} sleeps")

    @dispatch("all", on_device=False)
    def wake(self):
        LOG.append(f"{self.context.role} wakes")

    @dispatch("all")
    def generate(self):
        LOG.append(f"{self.context.role} generates")


@pytest.fixture
def groups():
    LOG.clear()
    runtime = LocalRuntime(RuntimeConfig(name="local"))
    runtime.start({"main": PoolConfig(device="cpu")}, {})
    yield [
        spawn(worker, runtime, role=role, pool="main")
        for role, worker in (("actor", Model), ("critic", Model), ("rollout", Engine))
    ]
    runtime.shutdown()


def shared(groups, record):
    """Return the groups with calls that are noted in `record` and acquire the devices."""
    sharing = DeviceSharing(groups[2:], groups[:2])
    return [group.recording(record, sharing.acquire) for group in groups]


def test_one_side_frees_the_devices_before_the_other_takes_them(groups):
    record = Record()
    actor, critic, rollout = shared(groups, record)

    rollout.generate()
    actor.look()  # does not need the device
    critic.learn()
    actor.learn()
    rollout.generate()
    rollout.generate()

    assert LOG == [
        "rollout generates", "actor looks",
        "rollout sleeps", "actor comes", "critic comes", "critic learns", "actor learns",
        "actor leaves", "critic leaves", "rollout wakes", "rollout generates", "rollout generates",
    ]  # fmt: skip
    names = ["before_to_training", "after_to_training", "before_to_rollout", "after_to_rollout"]
    assert list(record.metrics) == [f"memory_gb/{name}" for name in names]
    assert all(mean.value > 0 for mean in record.metrics.values())


def test_all_engines_of_a_pool_sleep_and_wake_together(groups):
    actor, _, rollout = groups
    other = spawn(Engine, rollout.runtime, role="other", pool="main")
    sharing = DeviceSharing([rollout, other], [actor])
    actor, rollout, other = (group.recording(Record(), sharing.acquire) for group in (actor, rollout, other))

    rollout.generate()
    actor.learn()
    other.generate()
    rollout.generate()

    assert LOG == [
        "rollout generates",
        "rollout sleeps", "other sleeps", "actor comes", "actor learns",
        "actor leaves", "rollout wakes", "other wakes", "other generates", "rollout generates",
    ]  # fmt: skip


@pytest.mark.parametrize("offloads", [False, True])
def test_responses_are_set_aside_until_the_engine_is_called(groups, offloads):
    record = Record()
    sharing = DeviceSharing(groups[2:], groups[:2], offloads=offloads, sets_aside=True)
    actor, critic, rollout = (group.recording(record, sharing.acquire) for group in groups)

    rollout.generate()
    actor.learn()
    critic.learn()
    sharing.acquire(rollout, resume=False)  # for new weights
    actor.learn()
    sharing.acquire(rollout, resume=False)
    rollout.generate()

    moves = {"rollout sleeps", "rollout wakes", "actor comes", "critic comes", "actor leaves", "critic leaves"}
    assert [line for line in LOG if line not in moves] == [
        "rollout generates", "rollout pauses", "actor learns", "critic learns", "actor learns",
        "rollout resumes", "rollout generates",
    ]  # fmt: skip
    assert moves.intersection(LOG) == (moves if offloads else set())
    if offloads:
        assert LOG[1:3] == ["rollout pauses", "rollout sleeps"]
        assert LOG[-3:] == ["rollout wakes", "rollout resumes", "rollout generates"]
    assert record.metrics["schedule/set_aside"].value == 3


def test_memory_is_noted_with_the_call_that_needs_the_devices(groups):
    """Metrics of an evaluation are not part of the next step."""
    evaluation, step = Record(), Record()
    sharing = DeviceSharing(groups[2:], groups[:2])
    actor = groups[0].recording(evaluation, sharing.acquire)
    rollout = groups[2].recording(step, sharing.acquire)

    actor.learn()
    rollout.generate()

    assert {name.partition("_to_")[2] for name in evaluation.metrics} == {"training"}
    assert {name.partition("_to_")[2] for name in step.metrics} == {"rollout"}
    assert set(evaluation.busy_s) == {"rollout.sleep", "actor.reload", "critic.reload", "actor.learn"}


def test_after_a_failed_switch_neither_side_has_the_devices(groups, monkeypatch):
    actor = shared(groups, Record())[0]

    def fail(self):
        raise RuntimeError("no room")

    monkeypatch.setattr(Model.__dict__["reload"], "function", fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no room"):
            actor.learn()
    assert LOG == ["rollout sleeps", "rollout sleeps"], (
        "it must try again, and never call a model that was not reloaded"
    )


HERE = set()
"""Names of the models of this process that are on the device."""


class Away(LocalBackend):
    """Backend whose model cannot compute while it is offloaded."""

    def __init__(self, config: LocalConfig, **options):
        super().__init__(config, **options)
        HERE.add(id(self))

    @property
    def is_here(self):
        return id(self) in HERE

    def offload(self):
        HERE.discard(id(self))

    def reload(self):
        HERE.add(id(self))

    def forward(self, *args, **options):
        assert self.is_here
        return super().forward(*args, **options)

    def forward_backward(self, *args, **options):
        assert self.is_here
        return super().forward_backward(*args, **options)

    def save(self, directory):
        assert self.is_here
        super().save(directory)

    def load(self, directory):
        assert self.is_here
        super().load(directory)

    def weights(self):
        assert not self.is_here, "weights must be sent while the engine has the device"
        return super().weights()


class Sleepy(HFRollout):
    """Engine that refuses to start, generate or load weights while a model is on the device."""

    def __init__(self, config: HFConfig, **options):
        assert not HERE
        super().__init__(config, **options)

    def wake(self):
        assert not HERE
        super().wake()

    def load_weights(self, weights, version):
        self._state.check()
        super().load_weights(weights, version)


@pytest.mark.parametrize("runtime", ["local", "ray"])
def test_a_run_with_device_sharing_gives_the_same_results_as_one_without(tmp_path, runtime):
    more = ["algorithm=ppo", "algorithm.kl.coefficient=0.1", "checkpoint.every_steps=1", "eval.every_steps=2"]
    strict = [f"backend={__name__}:Away", f"rollout={__name__}:Sleepy", "device_sharing=always", f"runtime={runtime}"]
    for steps in (2, 3):  # the second resumes
        HERE.clear()
        train(small_run(tmp_path / "plain", *more, steps=steps), dry_run=False)
        train(small_run(tmp_path / "shared", *more, *strict, steps=steps), dry_run=False)

    plain, shared = metrics(tmp_path / "plain"), metrics(tmp_path / "shared")
    lines = (tmp_path / "shared" / "r" / "metrics.jsonl").read_text().splitlines()
    seen = [{name for name in json.loads(line) if name.startswith("memory_gb/")} for line in lines]
    whole = {f"memory_gb/{when}_to_{whom}" for when in ("before", "after") for whom in ("rollout", "training")}
    assert seen == [set(), whole, whole, whole]
    assert shared == plain
