"""One real run, trained once, and copies of it that a test may change."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from rlcore_tests.runs import small_run

from rlcore.testing.waiting import HANG_S

STEPS = 12


def pytest_configure(config: pytest.Config) -> None:
    from rlcore_tests.gpus import hide_gpus

    hide_gpus(config)


def rlcore(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command `rlcore` in its own process."""
    return subprocess.run(
        [sys.executable, "-m", "rlcore", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100", **variables},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_rows(path: Path, rows: list[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    """The directory of a finished run with evaluations."""
    parent = tmp_path_factory.mktemp("outputs")
    done = rlcore("train", *small_run(parent, "eval.every_steps=4", steps=STEPS))
    assert done.returncode == 0, done.stderr
    return parent / "r"


@pytest.fixture
def copy(trained, tmp_path) -> Path:
    """A copy of the run, without its checkpoint."""
    target = tmp_path / "copy"
    shutil.copytree(trained, target, ignore=shutil.ignore_patterns("checkpoints"))
    return target


@pytest.fixture
def longer(copy) -> Callable[..., Path]:
    """Return a function that replaces the metrics of the copy: longer(100, name=function of the step)."""

    def write(steps: int, **columns: Callable[[int], float]) -> Path:
        names = {name.replace("__", "/"): value for name, value in columns.items()}
        line = rows(copy / "metrics.jsonl")[1]
        write_rows(
            copy / "metrics.jsonl",
            [line | {"step": step} | {name: value(step) for name, value in names.items()} for step in range(1, steps)],
        )
        return copy

    return write


@pytest.fixture(scope="session")
def recorded(tmp_path_factory) -> Path:
    """The directory of a finished run that was recorded."""
    parent = tmp_path_factory.mktemp("recorded")
    settings = ["eval.every_steps=4", "plugins.hooks=[report]", "checkpoint.every_steps=6"]
    done = rlcore("train", *small_run(parent, *settings, steps=STEPS))
    assert done.returncode == 0, done.stderr
    return parent / "r"
