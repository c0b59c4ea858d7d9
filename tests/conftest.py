"""Shared by all tests: one thread per process, and a model and data to test with."""

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

from rlcore.testing.assets import assets, each_assets  # noqa: F401


def pytest_configure(config):
    from rlcore.testing.gpus import hide_gpus

    hide_gpus(config)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder on sys.path; modules imported from it, and its plugins, are forgotten after the test."""
    from rlcore.registry import refresh

    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "") or ""):
            del sys.modules[name]
    monkeypatch.undo()
    refresh()
