"""Shared settings and fixtures: one thread per process, and `rlcore` commands in a child process."""

import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RLCORE_CACHE", str(Path.home() / ".cache" / "rlcore"))

import pytest
from rlcore_tests.assets import assets  # noqa: F401
from rlcore_tests.site import site  # noqa: F401

from rlcore.testing.waiting import HANG_S


def pytest_configure(config):
    from rlcore_tests.gpus import hide_gpus

    hide_gpus(config)


@pytest.fixture(scope="session")
def rlcore():
    """Return a function that runs `rlcore` in a child process."""

    def run(*arguments, python=sys.executable, cwd=None, **variables):
        return subprocess.run(
            [python, "-m", "rlcore", *map(str, arguments)],
            cwd=cwd,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )

    return run
