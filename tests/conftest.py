"""Shared by all tests: one thread per process, and a model and data to test with."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


from rlcore.testing.assets import assets, each_assets  # noqa: F401
from rlcore.testing.site import site  # noqa: F401


def pytest_configure(config):
    from rlcore.testing.gpus import hide_gpus

    hide_gpus(config)
