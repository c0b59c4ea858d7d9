"""Programs of test_two_machines.py: `head` and `broadcast 0` run on the first machine, the others on the second.

The first prints each result as a line of JSON. Both see /run, which lasts as long as the test.
"""

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from rlcore.testing.waiting import HANG_S

FIRST, SECOND = "192.168.77.1", "192.168.77.2"


def head():
    """Make a Ray cluster of both machines; form a group in one pool over both, and one between a pool on each."""
    import ray

    ray_start("--head", f"--node-ip-address={FIRST}", "--port=6399", "--include-dashboard=false", "--temp-dir=/run/ray")
    leave("head_is_up")
    find("node_is_up", 100)
    ray.init(address=f"{FIRST}:6399", logging_level="warning")
    for part in (pool_of_two, collective):
        try:
            result = part()
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
        print(json.dumps({part.__name__: result}), flush=True)


def node():
    find("head_is_up", 100)
    ray_start(f"--node-ip-address={SECOND}", f"--address={FIRST}:6399")
    leave("node_is_up")


def pool_of_two():
    from rlcore.controller.pool import PoolConfig

    with started(main=PoolConfig(nodes=2, device="cpu")):
        return "joined"


def collective():
    """Return whether the pools are on different machines, and the state of the receiver."""
    from rlcore.controller.group import spawn
    from rlcore.controller.pool import PoolConfig
    from rlcore.controller.transfer import Collective
    from tests.workers import Giver, Taker

    with started(a=PoolConfig(device="cpu"), b=PoolConfig(device="cpu")) as runtime:
        source = spawn(Giver, runtime, role="actor", pool="a")
        target = spawn(Taker, runtime, role="rollout", pool="b")
        Collective(source=source, target=target).send(1)
        return [runtime.address("a") != runtime.address("b"), target.state()]


@contextmanager
def started(**pools):
    """Return a runtime with these pools."""
    from rlcore.controller.make import make_runtime
    from rlcore.controller.pool import RuntimeConfig

    runtime = make_runtime(RuntimeConfig(address=f"{FIRST}:6399", start_timeout_s=60, call_timeout_s=20))
    try:
        runtime.start(pools, {})
        yield runtime
    finally:
        runtime.shutdown()


def broadcast(rank):
    """Send weights from a host of a local Ray cluster, whose interface is `lo`, to a server on another machine."""
    import torch

    from rlcore.controller.weights import Broadcast, meet, meeting_point

    if rank == 0:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = meeting_point(FIRST)
        leave("port", store.port)
    else:
        store = meet(FIRST, find("port", 60), 20)
    group = Broadcast(store, rank=rank, world_size=2, device="cpu", timeout_s=20)
    if rank == 0:
        group.send(iter([("w", torch.arange(5.0))]), 1000)
        print(json.dumps({"broadcast": find("got", 20)}))
    else:
        leave("got", [(name, tensor.tolist()) for name, tensor in group.receive()])


def leave(name, value=None):
    """Write a value for the other machine to read."""
    path = Path("/run", name)
    path.with_suffix(".new").write_text(json.dumps(value))
    path.with_suffix(".new").rename(path)


def find(name, seconds):
    """Read a value that the other machine has written."""
    deadline = time.monotonic() + seconds
    while not Path("/run", name).exists():
        assert time.monotonic() < deadline, f"the other machine did not get to '{name}' within {seconds} s"
        time.sleep(0.05)
    return json.loads(Path("/run", name).read_text())


def ray_start(*arguments):
    options = ["--disable-usage-stats", "--num-cpus=1", "--object-store-memory=100000000"]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *options, *arguments]
    subprocess.run(command, check=True, timeout=HANG_S, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    {"head": head, "node": node, "broadcast": broadcast}[sys.argv[1]](*map(int, sys.argv[2:]))
