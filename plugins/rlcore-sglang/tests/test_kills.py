"""Hosts and engines that are killed or stop responding: waiting calls fail, and no process of the engine is left."""

import asyncio
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest
from rlcore_sglang import SGLangConfig, SGLangRollout
from rlcore_sglang.engine import _Service

from rlcore.errors import DeadlineExceeded, InfrastructureError
from rlcore.protocols.backend import ModelConfig
from rlcore.protocols.rollout import RolloutContext
from rlcore.testing.rollout import request, run, weights
from rlcore.testing.waiting import HANG_S, wait_until
from rlcore.types import Request, Sampling


@pytest.fixture
def host(tiny_llama, request):
    """A process with an engine in it; yields it and the engine's pid."""
    command = [sys.executable, str(Path(__file__).with_name("host.py")), tiny_llama, request.param]
    host = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    watchdog = threading.Timer(HANG_S, host.kill)
    watchdog.start()
    engine = int(host.stdout.readline())
    try:
        yield host, engine
    finally:
        watchdog.cancel()
        host.kill()
        host.wait(HANG_S)
        host.stdout.close()
        for process in of(engine):
            process.kill()


@pytest.mark.parametrize("victim", ["scheduler", "engine"])
def test_a_killed_engine_process_is_reported_as_a_dead_engine_and_not_a_dead_host(tiny_llama, victim):
    engine = SGLangRollout(
        SGLangConfig(max_batch_size=16), model=ModelConfig(path=tiny_llama), context=RolloutContext()
    )
    own = engine._engine._process.pid
    scheduler = next(pid for pid in engine._engine.pids if "scheduler" in psutil.Process(pid).name())
    pids = {"engine": own, "scheduler": scheduler}
    killer = threading.Timer(0.5, os.kill, (pids[victim], signal.SIGKILL))
    killer.start()
    try:
        with pytest.raises(InfrastructureError, match=r"the SGLang engine of rollout rank 0 died \(pid \d+"):
            generate_for(engine, HANG_S)
        for action in (lambda: run(engine, [request(0)]), lambda: engine.load_weights(iter(weights(tiny_llama)), 1)):
            with pytest.raises(InfrastructureError, match="died"):
                action()
    finally:
        killer.join(HANG_S)
        engine.close()
    wait_until(lambda: not of(own))


def generate_for(engine, seconds):
    sampling, deadline = Sampling(max_response_tokens=240), time.monotonic() + seconds
    while time.monotonic() < deadline:
        run(engine, [Request(request_id=i, prompt_ids=[3, 4, 5], sampling=sampling, seed=i) for i in range(8)])


def of(engine):
    """Return the processes of an engine's session."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == engine and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, ProcessLookupError):
            continue
    return found


@pytest.mark.parametrize(
    ("host", "when"),
    [("start", "import"), ("start", "schedulers"), ("start", "both"), ("generate", "busy"), ("load", "taking")],
    indirect=["host"],
    ids=["importing", "starting schedulers", "starting schedulers, with its engine", "generating", "taking weights"],
)
def test_no_process_is_left_when_the_host_is_killed(host, when):
    process, engine = host
    if when == "import":
        time.sleep(1.0)
        assert [process.pid for process in of(engine)] == [engine], "importing SGLang takes seconds"
    elif when in ("schedulers", "both"):
        wait_until(lambda: len(of(engine)) >= 3)
    else:
        assert process.stdout.readline() == "started\n"
        if when == "taking":
            assert [process.stdout.readline() for _ in range(2)] == ["took a piece\n"] * 2
        else:
            time.sleep(1.5)
        assert len(of(engine)) >= 3, "an engine, its scheduler and its detokenizer"

    process.kill()
    if when == "both":
        os.kill(engine, signal.SIGKILL)

    wait_until(lambda: not of(engine))


def test_a_process_of_an_engine_that_ended_uncollected_ends_as_well():
    code = "from rlcore_sglang import engine; engine._end_with_engine(); print('still running')"
    with subprocess.Popen([sys.executable, "-c", ""]) as engine:
        wait_until(lambda: psutil.Process(engine.pid).status() == psutil.STATUS_ZOMBIE)
        variables = os.environ | {"RLCORE_SGLANG_ENGINE": str(engine.pid)}
        child = subprocess.run([sys.executable, "-c", code], env=variables, stdout=subprocess.PIPE, timeout=HANG_S)

    assert (child.returncode, child.stdout) == (1, b"")


_ENGINE = """#!{python}
import os, struct, sys, time
from multiprocessing.connection import Connection

connection = Connection(int(sys.argv[3]))
connection.recv()
connection.send((0, True, {{"pids": []}}))
{then}
"""
"""Replacement for SGLang that starts and then misbehaves."""


@pytest.mark.parametrize(
    ("then", "text"),
    [
        (
            "time.sleep(1000)",
            r"died \(pid \d+, signal SIGKILL\): it accepted no message within 1 s \(rollout.timeout_s\)",
        ),
        (
            "os.write(connection.fileno(), struct.pack('!i', 100) + b'x'); time.sleep(1000)",
            r"it stopped in the middle of a message for 1 s \(rollout.timeout_s\)",
        ),
        ("os.fork() and os._exit(3); time.sleep(1000)", r"died \(pid \d+, exit code 3\)"),
    ],
    ids=["reads nothing", "partial message", "a child holds the socket"],
)
def test_an_engine_that_stops_responding_is_abandoned_with_the_reason(small_model, tmp_path, then, text):
    python = tmp_path / "python"
    python.write_text(_ENGINE.format(python=sys.executable, then=then))
    python.chmod(0o755)
    config = SGLangConfig(python=str(python), timeout_s=1.0)
    engine = SGLangRollout(config, model=ModelConfig(path=small_model), context=RolloutContext())
    own = engine._engine._process.pid
    message = {"fills the socket": "x" * 2**21 if "no message" in text else ""}
    try:
        with pytest.raises(InfrastructureError, match=text):
            asyncio.run(asyncio.wait_for(engine._engine.answer([1], message), HANG_S))
        wait_until(lambda: not of(own))
    finally:
        engine.close()


def test_engine_that_does_not_start_in_time_names_both_deadlines(small_model, tmp_path):
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\nimport time\nprint('compiling', flush=True)\ntime.sleep(60)\n")
    python.chmod(0o755)
    config = SGLangConfig(python=str(python), start_timeout_s=3.0)

    with pytest.raises(DeadlineExceeded, match="did not start within 3 s; the end of its log:\ncompiling") as raised:
        SGLangRollout(config, model=ModelConfig(path=small_model), context=RolloutContext())

    assert str(raised.value).endswith("rollout.start_timeout_s=3600 runtime.start_timeout_s=4000")


def test_an_engine_whose_host_sends_no_options_exits_with_the_reason():
    code = "from rlcore_sglang import engine; engine._OPTIONS_TIMEOUT_S = 0.2; engine.main()"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-c", code, str(theirs.fileno())]
        done = subprocess.run(
            command,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            stderr=subprocess.PIPE,
            text=True,
            timeout=HANG_S,
        )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "TimeoutError: the host sent no options within 0.2 s"


def test_a_service_whose_host_stops_in_the_middle_of_a_message_exits_with_the_reason(capsys):
    ours, theirs = socket.socketpair()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 200_000))
    with ours:
        connection = Connection(theirs.detach())
        ours.send(struct.pack("!i", 100) + b"x")
        asyncio.run(asyncio.wait_for(_Service(_NoEngine(), connection).run(), HANG_S))
        connection.close()
    assert "TimeoutError: the host stopped in the middle of a message" in capsys.readouterr().err


def test_a_message_that_arrives_in_parts_is_read_completely_with_uvloop():
    uvloop = pytest.importorskip("uvloop", reason="SGLang brings it")
    ours, theirs = socket.socketpair()
    host, connection = Connection(ours.detach()), Connection(theirs.detach())
    content = pickle.dumps((1, "cancel", {"input_ids": list(range(5000))}))
    message = struct.pack("!i", len(content)) + content

    async def go():
        served = asyncio.create_task(_Service(_NoEngine(), connection).run())
        writing = asyncio.create_task(asyncio.to_thread(write_slowly, host, message))
        await writing
        await asyncio.sleep(0.1)
        assert not served.done(), "the service gave up on its host"
        host.close()
        await asyncio.wait_for(served, HANG_S)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(go())
    connection.close()


def write_slowly(host, message):
    for start, stop in ((0, 2), (2, 100), (100, 2000), (2000, None)):
        os.write(host.fileno(), message[start:stop])
        time.sleep(0.1)


class _NoEngine:
    tokenizer_manager = property(lambda self: self)

    def auto_create_handle_loop(self):
        pass

    def get_all_child_pids(self):
        return []
