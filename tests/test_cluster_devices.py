"""device=auto on a Ray cluster that declares GPUs, used from a process without one."""

import logging
import os
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import ray

from rlcore.controller.make import make_runtime
from rlcore.controller.pool import PoolConfig, RuntimeConfig
from rlcore.controller.ray_host import RayHost
from rlcore.errors import CapacityError
from rlcore.testing.waiting import HANG_S
from rlcore.trainer.launch import start_roles
from rlcore.workers.policy import PolicyWorker
from rlcore.workers.rollout import RolloutWorker


class Seen:
    """Host with a simulated device, because PyTorch would look for a real one."""

    def __init__(self, info, store):
        self.info = info

    def device(self):
        return str(self.info.device)

    def visible(self):
        return os.environ["CUDA_VISIBLE_DEVICES"]


class SeenHost(RayHost):
    """Ray actor with the simulated host."""

    def __init__(self, info, alone):
        with mock.patch("rlcore.controller.ray_host.Host", Seen):
            super().__init__(info, alone)


@contextmanager
def cluster(monkeypatch, num_gpus, pools):
    """Start these pools on an existing cluster of one node."""
    monkeypatch.setattr("rlcore.controller.ray_runtime.RayHost", SeenHost)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    options = {"include_dashboard": False, "_node_ip_address": "127.0.0.1", "logging_level": logging.WARNING}
    ray.init(num_cpus=4, num_gpus=num_gpus, **options)
    runtime = make_runtime(RuntimeConfig(name="ray"))
    try:
        runtime.start(pools, {})
        yield runtime
    finally:
        runtime.shutdown()
        ray.shutdown()


def test_auto_is_cuda_where_the_cluster_has_gpus_and_the_controller_none(monkeypatch, caplog):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    with cluster(monkeypatch, 4, {"main": PoolConfig(), "other": PoolConfig(device="cpu")}) as runtime:
        assert (runtime.device("main"), runtime.device("other")) == ("cuda", "cpu")
        assert runtime.wait([runtime.submit("main", 0, "device")], "device", HANG_S) == ["cuda:0"]
    assert "pools.main.device=auto is cuda: 1 of 1 nodes of the cluster have GPUs" in caplog.text


def test_auto_is_cpu_where_only_the_controller_has_a_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)

    with cluster(monkeypatch, 0, {"main": PoolConfig()}) as runtime:
        assert runtime.device("main") == "cpu"


def test_auto_never_falls_back_to_cpus_where_gpus_do_not_suffice(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    with (
        pytest.raises(CapacityError, match="2 CPU and 2 GPU on each of 1 nodes; the cluster has 4 CPU and 1 GPU"),
        cluster(monkeypatch, 1, {"main": PoolConfig(devices_per_node=2)}),
    ):
        pass


@pytest.mark.parametrize(("setting", "device", "took"), [("auto", "cpu", 0), ("auto", "cuda", 1), ("always", "cpu", 1)])
def test_sharing_planned_for_gpus_is_not_used_on_cpus(monkeypatch, setting, device, took):
    left = []
    group = SimpleNamespace(offload=lambda: left.append("actor"))
    workers = {
        "actor": SimpleNamespace(object=PolicyWorker),
        "rollout": SimpleNamespace(object=RolloutWorker),
    }
    monkeypatch.setattr("rlcore.trainer.launch._spawn", lambda plan, runtime, role: group)
    monkeypatch.setattr(
        "rlcore.trainer.launch.Roles", lambda *_, **__: SimpleNamespace(share_devices=lambda groups: None)
    )
    monkeypatch.setattr("rlcore.trainer.launch.sampling", lambda config: None)
    config = SimpleNamespace(
        device_sharing=setting, pools={}, sampling=SimpleNamespace(samples_per_prompt=1), reward=None
    )
    plan = SimpleNamespace(
        config=config,
        placement={"actor": "m", "rollout": "m"},
        sharing=("actor",),
        rewards=(),
        workers=workers,
        roles={},
    )
    runtime = SimpleNamespace(start=lambda pools, env: None, device=lambda pool: device)

    start_roles(plan, runtime, None, ["actor", "rollout"])

    assert len(left) == took


def test_host_takes_its_own_gpu_where_ray_does_not_set_it(monkeypatch):
    """Clusters of other frameworks often set this variable; then every process sees all GPUs."""
    monkeypatch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")

    with cluster(monkeypatch, 2, {name: PoolConfig(device="cuda") for name in ("a", "b")}) as runtime:
        handles = [runtime.submit(name, 0, "visible") for name in ("a", "b")]

        assert sorted(runtime.wait(handles, "visible", HANG_S)) == ["0", "1"]
