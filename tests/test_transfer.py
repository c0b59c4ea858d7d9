"""Weight transfer between pools: complete or an error, in buckets, and usable after a failure."""

import logging
import time
import weakref

import pytest
import ray
import torch
from rlcore_tests.runs import metrics, small_run
from safetensors.torch import load_file, save_file

from rlcore.cli.train import run as train
from rlcore.controller.group import spawn
from rlcore.controller.make import make_runtime
from rlcore.controller.pool import PoolConfig, RuntimeConfig
from rlcore.controller.runtime import LocalStore
from rlcore.controller.transfer import Collective, InProcess, ObjectStore
from rlcore.errors import ConfigError, DeadlineExceeded, HostDied, InfrastructureError, ModelError
from rlcore.testing.training import make_batch, save_model
from rlcore.testing.waiting import HANG_S
from rlcore.workers.policy import PolicyWorker, ReferenceWorker
from tests.workers import Giver, Taker, model_group, some_weights

BUCKET = 2048


def start(name, timeout_s=HANG_S):
    """Start a runtime with two pools of two hosts, whatever the number of cores."""
    if name == "ray" and not ray.is_initialized():
        ray.init(num_cpus=8, include_dashboard=False, _node_ip_address="127.0.0.1", logging_level=logging.WARNING)
    runtime = make_runtime(RuntimeConfig(name=name, call_timeout_s=timeout_s))
    runtime.start({pool: PoolConfig(devices_per_node=2, device="cpu") for pool in ("a", "b")}, {})
    return runtime


@pytest.fixture(scope="module", autouse=True)
def cluster():
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr("rlcore.controller.weights.BUCKET_BYTES", BUCKET)


@pytest.fixture(scope="module")
def runtimes():
    """Return runtimes by name, started on first use."""
    started = {}
    yield lambda name: started[name] if name in started else started.setdefault(name, start(name))
    for runtime in started.values():
        runtime.shutdown()


@pytest.fixture(
    params=[("local", ObjectStore), ("ray", ObjectStore), ("ray", Collective)],
    ids=lambda it: f"{it[0]}-{it[1].__name__}",
)
def parts(runtimes, request):
    """(source, target, way)."""
    name, way = request.param
    source = spawn(Giver, runtimes(name), role="actor", pool="a")
    target = spawn(Taker, runtimes(name), role="rollout", pool="b")
    return source, target, way(source=source, target=target)


def test_every_rank_gets_equal_weights_with_the_version(parts):
    source, target, way = parts
    for version in (1, 2, 3):
        source.become(version)
        way.send(version)

        assert target.state() == [(version, True, True)] * 2
    assert source.walks() == [3, 3], "gathering is collective: every rank walks"


def test_after_a_failure_of_the_source_no_rank_has_the_version(parts):
    source, target, way = parts
    way.send(1)
    source.become(2, fails_at="layer.7")

    with pytest.raises(ValueError, match="the source fails"):
        way.send(2)

    assert target.state() == [(1, False, True)] * 2, "the load must have begun, and have ended with an error"
    source.become(3)
    way.send(3)
    assert target.state() == [(3, True, True)] * 2


@pytest.mark.parametrize("name", ["a", "large", "layer.19", "the end"])
def test_when_one_rank_fails_none_serves_until_the_next_update(parts, name):
    source, target, way = parts
    target.fail_at(name)

    with pytest.raises(ValueError, match="the target fails"):
        way.send(1)

    assert [whole for _, whole, _ in target.state()] == [False, False], "one that had all of it must not serve either"
    target.fail_at("")
    source.become(2)
    way.send(2)
    assert target.state() == [(2, True, True)] * 2


def test_when_one_host_of_a_shared_pool_fails_none_serves(runtimes):
    source, target = (spawn(it, runtimes("ray"), role=it.__name__, pool="a") for it in (Giver, Taker))
    way = InProcess(source=source, target=target)
    target.fail_at("half")

    with pytest.raises(ValueError, match="the target fails"):
        way.send(1)

    assert [whole for _, whole, _ in target.state()] == [False, False]
    target.fail_at("")
    way.send(1)
    assert target.state() == [(1, True, True)] * 2


def test_two_routes_between_the_same_hosts_do_not_mix(runtimes):
    runtime = runtimes("ray")
    sources = [spawn(Giver, runtime, role=f"source_{pool}", pool=pool) for pool in ("a", "b")]
    targets = [spawn(Taker, runtime, role=f"target_{pool}", pool=pool) for pool in ("b", "a")]
    ways = [Collective(source=source, target=target) for source, target in zip(sources, targets)]

    for version in (1, 2):
        for source, way in zip(sources, ways):
            source.become(version)
            way.send(version)

    for target in targets:
        assert [(seen, whole) for seen, whole, _ in target.state()] == [(2, True)] * 2


def test_the_group_is_built_once(runtimes, monkeypatch):
    runtime = runtimes("ray")
    source, target = (spawn(it, runtime, role=it.__name__, pool=pool) for it, pool in ((Giver, "a"), (Taker, "b")))
    way = Collective(source=source, target=target)
    submit, seen = runtime.submit, []
    monkeypatch.setattr(
        runtime, "submit", lambda pool, rank, *what: (seen.append(what[0]), submit(pool, rank, *what))[1]
    )

    for version in (1, 2):
        source.become(version)
        way.send(version)

    assert (seen.count("open_broadcast"), seen.count("join_broadcast"), seen.count("take_weights")) == (1, 3, 4)


class CountingStore(LocalStore):
    """Store that counts the bytes that are still referenced."""

    def __init__(self):
        self.live, self.most = weakref.WeakSet(), 0

    def put(self, values):
        self.live.update(values)
        self.most = max(self.most, sum(tensor.nbytes for tensor in self.live))
        return super().put(values)


def test_the_store_never_has_more_than_two_buckets(monkeypatch):
    monkeypatch.setattr("rlcore.controller.runtime.LocalStore", CountingStore)
    runtime = start("local")
    source, target = (spawn(it, runtime, role=it.__name__, pool=pool) for it, pool in ((Giver, "a"), (Taker, "b")))
    monkeypatch.setattr(Giver, "weights", lambda self: ((name, t.clone()) for name, t in some_weights(1).items()))
    ObjectStore(source=source, target=target).send(1)
    runtime.shutdown()

    largest, other, whole = 4 * 64 * 64, 400, sum(tensor.nbytes for tensor in some_weights(1).values())
    assert largest <= runtime.store.most <= largest + 2 * (BUCKET + other) < whole


@pytest.mark.parametrize("way", [ObjectStore, Collective])
def test_a_target_killed_during_a_transfer_is_reported_at_once(way):
    runtime = start("ray")
    try:
        source = spawn(Giver, runtime, role="actor", pool="a")
        target = spawn(Taker, runtime, role="rollout", pool="b")
        transfer = way(source=source, target=target)
        transfer.send(1)
        target.fail_at("die at layer.3")

        with pytest.raises(HostDied, match="rank 1 of pool 'b' died"):
            transfer.send(2)
    finally:
        runtime.shutdown()


class OneRaisesOneHangs(Taker):
    """Worker whose first rank cannot load the weights, and whose second one receives all of them and hangs."""

    def load_weights(self, weights, version):
        if self.context.rank == 0:
            raise InfrastructureError("no memory for the weights")
        super().load_weights(weights, version)
        time.sleep(HANG_S)


def test_when_one_engine_raises_and_the_other_hangs_the_error_names_it():
    runtime = start("ray", timeout_s=10.0)
    try:
        source = spawn(Giver, runtime, role="actor", pool="a")
        target = spawn(OneRaisesOneHangs, runtime, role="rollout", pool="b")
        target.members.tolerate(1, keeper="a")

        with pytest.raises(DeadlineExceeded) as raised:
            Collective(source=source, target=target).send(1)
    finally:
        runtime.shutdown()

    assert "stack of rank 1 of pool 'b':\n" in str(raised.value)
    assert "in load_weights" in str(raised.value)
    assert "1 other engines of pool 'b' failed before; schedule.max_engine_failures=1" in raised.value.__notes__


def test_an_impossible_transfer_method_is_refused_with_a_possible_one():
    runtime = make_runtime(RuntimeConfig(name="local"))
    runtime.start({pool: PoolConfig(device="cpu") for pool in ("a", "b")}, {})
    source, same, other = (
        spawn(it, runtime, role=role, pool=pool)
        for it, role, pool in ((Giver, "actor", "a"), (Taker, "rollout", "a"), (Taker, "rollout", "b"))
    )
    with pytest.raises(ConfigError, match=r"but both are in one pool\nType  transfer=inprocess"):
        Collective(source=source, target=same)
    with pytest.raises(ConfigError, match=r"runtime=local has only one process\nType  transfer=object_store"):
        Collective(source=source, target=other)
    with pytest.raises(ConfigError, match="Type  transfer=object_store"):
        InProcess(source=source, target=other)


@pytest.mark.parametrize(("way", "pool"), [(InProcess, "a"), (ObjectStore, "b")])
def test_a_model_copies_and_mixes_in_the_weights_of_another_model(way, pool, tmp_path):
    runtime = make_runtime(RuntimeConfig(name="local"))
    runtime.start({name: PoolConfig(device="cpu") for name in ("a", "b")}, {})
    paths = [save_model("qwen3", tmp_path / name) for name in ("first", "second", "mean")]
    first = {name: tensor * 0.5 for name, tensor in load_file(tmp_path / "first" / "model.safetensors").items()}
    second = load_file(tmp_path / "second" / "model.safetensors")
    save_file(first, tmp_path / "first" / "model.safetensors", {"format": "pt"})
    mean = {name: 0.75 * second[name] + 0.25 * first[name] for name in first}
    save_file(mean, tmp_path / "mean" / "model.safetensors", {"format": "pt"})
    expected = model_group(PolicyWorker, runtime, "a", paths[2]).log_probs(make_batch()).fetch("log_probs")
    source = model_group(PolicyWorker, runtime, "a", paths[0])
    target = model_group(ReferenceWorker, runtime, pool, paths[1])

    way(source=source, target=target).send(1, mix=0.25)
    mixed = target.log_probs(make_batch()).fetch("ref_log_probs")
    way(source=source, target=target).send(1)
    copied = target.log_probs(make_batch()).fetch("ref_log_probs")

    torch.testing.assert_close(mixed, expected)
    assert torch.equal(copied, source.log_probs(make_batch()).fetch("log_probs"))
    assert float((copied - mixed).abs().max()) > 0.01


class HalfAPolicy(PolicyWorker):
    """Backend that sends some of its weights, then fails."""

    def weights(self):
        yield from list(super().weights())[:3]
        raise ValueError("the source fails")


@pytest.mark.parametrize(("way", "pool"), [(InProcess, "a"), (ObjectStore, "b")])
def test_a_model_that_got_some_of_the_weights_is_not_used(way, pool, tmp_path):
    runtime = make_runtime(RuntimeConfig(name="local"))
    runtime.start({name: PoolConfig(device="cpu") for name in ("a", "b")}, {})
    path = save_model("qwen3", tmp_path / "model")
    source, target = model_group(HalfAPolicy, runtime, "a", path), model_group(ReferenceWorker, runtime, pool, path)

    with pytest.raises(ValueError, match="the source fails"):
        way(source=source, target=target).send(1, mix=0.5)

    with pytest.raises(ModelError, match="incomplete weights"):
        target.log_probs(make_batch())


@pytest.mark.parametrize("transfer", ["object_store", "collective"])
def test_a_run_with_two_pools_equals_a_run_in_one_process(tmp_path, transfer):
    train(small_run(tmp_path / "local", steps=3), dry_run=False)
    more = ["runtime=ray", "placement=split", f"transfer={transfer}"]
    train(small_run(tmp_path / "split", *more, steps=3), dry_run=False)
    assert metrics(tmp_path / "split") == metrics(tmp_path / "local")
