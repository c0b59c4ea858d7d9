"""Failures of the Ray runtime: hangs are diagnosed, and dead hosts are reported immediately."""

import contextlib
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from rlcore.controller.group import spawn
from rlcore.controller.make import make_runtime
from rlcore.controller.pool import PoolConfig, RuntimeConfig
from rlcore.errors import DeadlineExceeded, HostDied, InfrastructureError
from rlcore.testing.waiting import HANG_S
from tests.workers import Echo, SlowToStart


@pytest.fixture
def echo(request):
    runtime = make_runtime(RuntimeConfig(name="ray", call_timeout_s=request.param))
    runtime.start({"main": PoolConfig(devices_per_node=2, device="cpu")}, {})
    yield spawn(Echo, runtime, role="echo", pool="main")
    runtime.shutdown()


@pytest.mark.parametrize("echo", [HANG_S], indirect=True)
def test_dead_host_is_reported_before_the_deadline(echo):
    with pytest.raises(HostDied, match="rank 1 of pool 'main' died"):
        echo.die(rank=1)

    with pytest.raises(HostDied):
        echo.who("still there?")


@pytest.mark.parametrize("echo", [5], indirect=True)
def test_a_deadline_shows_the_stack_of_the_stuck_rank(echo):
    with pytest.raises(DeadlineExceeded, match=r"echo.hang did not finish within 5 s; waiting for 2 ranks") as raised:
        echo.hang()

    assert "in hang" in str(raised.value)
    assert "runtime.call_timeout_s" in str(raised.value)


def test_the_deadline_of_a_start_names_its_setting():
    runtime = make_runtime(RuntimeConfig(name="ray", start_timeout_s=60))
    try:
        runtime.start({"main": PoolConfig(device="cpu")}, {})
        runtime.config = replace(runtime.config, start_timeout_s=2)

        with pytest.raises(DeadlineExceeded) as raised:
            spawn(SlowToStart, runtime, role="slow", pool="main")
    finally:
        runtime.shutdown()

    lines = str(raised.value).splitlines()
    assert lines[0] == "slow.__init__ did not finish within 2 s; waiting for 1 ranks:"
    assert lines[-1] == "Wait longer:  runtime.start_timeout_s=4"


SLOW = Exception("The current node timed out during startup. This could happen because ...")
"""Error of Ray when its processes need more than 30 s."""


def start_with(monkeypatch, failures, **config):
    """Start a runtime whose Ray raises these errors; return the final error and the number of starts."""
    pending = list(failures)
    starts = []

    def init(**options):
        starts.append(options)
        raise pending.pop(0) if len(pending) > 1 else pending[0]

    monkeypatch.setattr("ray.init", init)
    with pytest.raises(InfrastructureError) as raised:
        make_runtime(RuntimeConfig(name="ray", **config)).start({"main": PoolConfig(device="cpu")}, {})
    return str(raised.value), len(starts)


def test_ray_is_started_again_after_its_own_time_limit(monkeypatch, caplog):
    text, starts = start_with(monkeypatch, [SLOW, SLOW, OSError("no space left on device")])

    assert starts == 3
    assert caplog.text.count("Ray did not start (The current node timed out during startup.") == 2
    assert text.splitlines()[0] == "Ray did not start: no space left on device"
    assert "rlcore doctor" in text.splitlines()[1]


def test_when_ray_does_not_start_in_time_the_setting_is_named(monkeypatch):
    text, starts = start_with(monkeypatch, [SLOW], start_timeout_s=1e-9)

    assert starts == 1
    assert text.startswith("Ray did not start within 1e-09 s: The current node timed out during startup.")
    assert text.endswith("\nWait longer:  runtime.start_timeout_s=2e-09")


def test_a_cluster_that_refuses_the_driver_is_named(monkeypatch):
    monkeypatch.setattr("rlcore.controller.ray_runtime._check_address", lambda address: None)

    text, _ = start_with(monkeypatch, [ConnectionError("Failed to connect")], address="10.0.0.1:6379")

    assert text.startswith("runtime.address=10.0.0.1:6379: cannot join this Ray cluster: Failed to connect\n")
    assert "export RAY_AUTH_MODE=token" in text


def test_processes_of_an_abandoned_start_are_ended(monkeypatch):
    get_node, calls = ray._private.services.get_node, []

    def late(*args):
        calls.append(args)
        if len(calls) == 1:
            raise SLOW
        return get_node(*args)

    monkeypatch.setattr("ray._private.services.get_node", late)
    runtime = make_runtime(RuntimeConfig(name="ray"))
    try:
        runtime.start({"main": PoolConfig(device="cpu")}, {})

        assert children_named("raylet") == 1
    finally:
        runtime.shutdown()


def children_named(name):
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended
            _, command, rest = re.split(r"[()]", (process / "stat").read_text(), maxsplit=2)
            state, parent, *_ = rest.split()
            count += command == name and int(parent) == os.getpid() and state != "Z"
    return count
