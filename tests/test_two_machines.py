"""Groups over two machines: network namespaces with real gloo and real Ray, where the host name is a loopback address."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlcore.testing.waiting import HANG_S

HERE = Path(__file__).parent
UNSHARE = ["unshare", "-rnmpf", "--kill-child", "--mount-proc"]


def why_not():
    """Reason why this machine cannot emulate two, or empty."""
    missing = [tool for tool in ("unshare", "ip", "bash") if shutil.which(tool) is None]
    if missing:
        return f"no {' and no '.join(missing)} command"
    tried = subprocess.run(
        [*UNSHARE, "bash", HERE / "two_machines.sh", "true", "true"],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    return f"network namespaces are not permitted here: {tried.stderr.strip()}" if tried.returncode else ""


@pytest.fixture(scope="module")
def on_two_machines():
    """Run tests/two_machines.py on both machines; return the output of the first."""
    reason = why_not()
    if reason:
        pytest.skip(reason)

    def run(first, second, seconds):
        python = f"{sys.executable} -m tests.two_machines"
        environment = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
        done = subprocess.run(
            [*UNSHARE, "bash", HERE / "two_machines.sh", f"{python} {first}", f"{python} {second}"],
            cwd=HERE.parent,
            env=environment | {"RAY_AUTH_MODE": "disabled"},
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    return run


@pytest.fixture(scope="module")
def of_a_cluster(on_two_machines):
    """Facts that tests/two_machines.py reports about a Ray cluster of both."""
    return {name: result for line in on_two_machines("head", "node", 240) for name, result in line.items()}


@pytest.mark.slow
def test_pool_over_two_machines_joins(of_a_cluster):
    assert of_a_cluster["pool_of_two"] == "joined"


@pytest.mark.slow
def test_weights_are_broadcast_between_cpu_pools_on_two_machines(of_a_cluster):
    assert of_a_cluster["collective"] == [True, [[1, True, True]]]


def test_weights_are_broadcast_from_a_local_cluster_to_another_machine(on_two_machines):
    assert on_two_machines("broadcast 0", "broadcast 1", 120) == [{"broadcast": [["w", [0.0, 1.0, 2.0, 3.0, 4.0]]]}]
