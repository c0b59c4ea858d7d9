"""The Ray runtime when things go wrong: a hang is a diagnosis, a death is said at once."""

import time

import pytest

from rlcore.controller.group import spawn
from rlcore.controller.pool import PoolConfig
from rlcore.controller.runtime import RuntimeConfig, make_runtime
from rlcore.errors import DeadlineExceeded, HostDied
from tests.workers import Echo


@pytest.fixture
def echo():
    runtime = make_runtime(RuntimeConfig(name="ray", call_timeout_s=2))
    runtime.start({"main": PoolConfig(devices_per_node=2, device="cpu")}, {})
    yield spawn(Echo, runtime, role="echo", pool="main")
    runtime.shutdown()


def test_a_dead_host_is_said_at_once_and_not_waited_for(echo):
    start = time.monotonic()

    with pytest.raises(HostDied, match="rank 1 of pool 'main' died"):
        echo.die(rank=1)

    assert time.monotonic() - start < 10
    with pytest.raises(HostDied):
        echo.who("still there?")


def test_a_deadline_shows_the_stack_of_the_stuck_rank(echo):
    with pytest.raises(DeadlineExceeded, match=r"echo.hang did not end within 2 s; waiting for 2 ranks") as raised:
        echo.hang()

    assert "in hang" in str(raised.value)
    assert "runtime.call_timeout_s" in str(raised.value)
