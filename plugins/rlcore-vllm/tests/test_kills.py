"""An engine in a Ray host that is killed in each phase: the waiting call fails at once. If one of several engines fails
during a weight update, the others do not serve the new weights."""

import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from rlcore_vllm import VLLMConfig

from rlcore.controller.dispatch import dispatch
from rlcore.controller.group import spawn
from rlcore.controller.make import make_runtime
from rlcore.controller.pool import PoolConfig, RuntimeConfig
from rlcore.controller.transfer import InProcess
from rlcore.data.batch import Batch
from rlcore.errors import HostDied, InfrastructureError
from rlcore.models.load import load_model
from rlcore.protocols.backend import ModelConfig
from rlcore.protocols.dispatch import Call
from rlcore.registry import resolve
from rlcore.testing.waiting import HANG_S
from rlcore.types import Sampling
from rlcore.workers.base import Worker
from rlcore.workers.rollout import RolloutWorker

pytestmark = pytest.mark.slow


class Trained(Worker):
    """A worker with new weights."""

    def __init__(self, context, *, path):
        super().__init__(context)
        self.model = load_model(path).requires_grad_(False)

    def weights(self):
        for name, parameter in self.model.named_parameters():
            yield name, parameter * 1.3


class Failing(RolloutWorker):
    """A rollout worker whose rank 1 fails after all weights have arrived, until it is repaired."""

    accident: Any = None

    def load_weights(self, weights, version):
        super().load_weights(weights, version)
        if self.context.rank == 1 and self.accident:
            self.accident()

    @dispatch("all")
    def will(self, accident: str) -> None:
        self.accident = {"fail": _fail, "die": _die, "": None}[accident]


def _fail():
    raise ValueError("out of luck")


def _die():
    os.kill(os.getpid(), signal.SIGKILL)


class Known(RolloutWorker):
    """A rollout worker that writes its process id before the engine is created."""

    def __init__(self, context, *, pid_file, **options):
        Path(pid_file).write_text(str(os.getpid()))
        super().__init__(context, **options)

    @dispatch("all")
    def load_slowly(self) -> None:
        def slow():
            for name, shape in self.engine._expected.shapes.items():
                time.sleep(0.5)
                yield name, torch.zeros(shape)

        self.engine.load_weights(slow(), 1)


@pytest.fixture
def killed(small_model, tmp_path, monkeypatch):
    """`killed(phase)` creates the engine, runs the phase and kills the engine's process meanwhile."""
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])
    runtime = make_runtime(RuntimeConfig(name="ray", start_timeout_s=HANG_S, call_timeout_s=HANG_S))
    pid_file = tmp_path / "pid"

    def kill(after_s):
        while not pid_file.exists() or not pid_file.read_text():
            time.sleep(0.02)
        time.sleep(after_s)
        os.kill(int(pid_file.read_text()), signal.SIGKILL)

    def make():
        options = {
            "rollout": resolve("rollout", "vllm").spec,
            "rollout_config": VLLMConfig(max_batch_size=16),
            "model": ModelConfig(path=small_model),
            "pid_file": str(pid_file),
        }
        return spawn(Known, runtime, role="rollout", pool="main", options=options)

    def killed(phase, after_s):
        runtime.start({"main": PoolConfig(device="cpu")}, {})
        engine = None if phase == "start" else make()
        killer = threading.Thread(target=kill, args=(after_s,))
        killer.start()
        with pytest.raises(HostDied, match="the host of rank 0 of pool 'main' died"):
            make() if engine is None else phase(engine)
        killer.join()

    yield killed
    runtime.shutdown()


def some_prompts():
    return Batch.of(lengths=[2] * 8, tokens={"input_ids": [3, 4] * 8}, rows={"group_id": range(8), "seed": range(8)})


def generate(engine):
    for _ in range(1000):
        engine.generate(some_prompts(), Sampling(max_response_tokens=200, stop_token_ids=()), 2)


def load(engine):
    engine.load_slowly()


@pytest.mark.parametrize(
    ("phase", "after_s"), [("start", 2.0), (generate, 1.5), (load, 1.0)], ids=["start", "generate", "load"]
)
def test_killed_engine_is_a_dead_host_before_the_deadline(killed, phase, after_s):
    killed(phase, after_s)


@pytest.mark.parametrize(("accident", "error"), [("fail", ValueError), ("die", HostDied)])
def test_no_engine_serves_a_version_that_another_engine_lacks(accident, error, small_model, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])
    ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1", logging_level=logging.ERROR)
    runtime = make_runtime(RuntimeConfig(name="ray", start_timeout_s=HANG_S, call_timeout_s=HANG_S))
    try:
        runtime.start({"main": PoolConfig(device="cpu", devices_per_node=2)}, {})
        source = spawn(Trained, runtime, role="actor", pool="main", options={"path": small_model})
        options = {
            "rollout": resolve("rollout", "vllm").spec,
            "rollout_config": VLLMConfig(max_batch_size=16),
            "model": ModelConfig(path=small_model),
        }
        engines = spawn(Failing, runtime, role="rollout", pool="main", options=options)
        way = InProcess(source=source, target=engines)
        way.send(1)
        engines.will(accident)

        with pytest.raises(error):
            way.send(2)

        call = Call((some_prompts(), Sampling(max_response_tokens=4), 1))  # to the engine that received them
        with pytest.raises(InfrastructureError, match=r"incomplete weights: .*\nLoad them again"):
            runtime.wait([runtime.submit("main", 0, "call", "rollout", "generate", call)], "generate", HANG_S)
        if accident == "fail":
            engines.will("")
            way.send(3)
            samples = engines.generate(some_prompts(), Sampling(max_response_tokens=4), 1)
            assert samples.fetch("policy_version").tolist() == [3] * 8
    finally:
        runtime.shutdown()
        ray.shutdown()
