"""An engine in a host of Ray that is killed in each of its phases: the call that waits says so, at once."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from rlcore_vllm import VLLMConfig

from rlcore.controller.dispatch import dispatch
from rlcore.controller.group import spawn
from rlcore.controller.pool import PoolConfig
from rlcore.controller.runtime import RuntimeConfig, make_runtime
from rlcore.data.batch import Batch
from rlcore.errors import HostDied
from rlcore.protocols.backend import ModelConfig
from rlcore.registry import resolve
from rlcore.types import Sampling
from rlcore.workers.rollout import RolloutWorker

pytestmark = pytest.mark.slow
_SOON_S = 15.0


class Known(RolloutWorker):
    """A rollout worker that leaves its process id before the engine is made."""

    def __init__(self, context, *, pid_file, **options):
        Path(pid_file).write_text(str(os.getpid()))
        super().__init__(context, **options)

    @dispatch("all")
    def load_slowly(self) -> None:
        def slow():
            for name, shape in self.engine._expected._shapes.items():
                time.sleep(0.5)
                yield name, torch.zeros(shape)

        self.engine.load_weights(slow(), 1)


@pytest.fixture
def killed(small_model, tmp_path, monkeypatch):
    """`killed(phase)`: makes the engine, lets it do something, kills its process meanwhile; returns the seconds it took
    from then until the error."""
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])
    runtime = make_runtime(RuntimeConfig(name="ray", start_timeout_s=120, call_timeout_s=120))
    pid_file, when = tmp_path / "pid", []

    def kill(after_s):
        while not pid_file.exists() or not pid_file.read_text():
            time.sleep(0.02)
        time.sleep(after_s)
        when.append(time.monotonic())
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
        return time.monotonic() - when[0]

    yield killed
    runtime.shutdown()


def generate(engine):
    prompts = Batch.of(lengths=[2] * 8, tokens={"input_ids": [3, 4] * 8}, rows={"group_id": range(8), "seed": range(8)})
    for _ in range(1000):
        engine.generate(prompts, Sampling(max_response_tokens=200, stop_token_ids=()), 2)


def load(engine):
    engine.load_slowly()


@pytest.mark.parametrize(
    ("phase", "after_s"), [("start", 2.0), (generate, 1.5), (load, 1.0)], ids=["start", "generate", "load"]
)
def test_an_engine_that_is_killed_is_said_at_once(killed, phase, after_s):
    assert killed(phase, after_s) < _SOON_S
