"""Fixtures shared by the tests of this plugin."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from rlcore_tests.assets import assets  # noqa: F401


def pytest_configure(config):
    from rlcore_tests.gpus import hide_gpus

    hide_gpus(config)
