"""Settings and fixtures of all tests: one thread per process, a model and data."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hypothesis
from rlcore_tests.assets import assets, each_assets  # noqa: F401
from rlcore_tests.site import site  # noqa: F401

hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")


def pytest_configure(config):
    from rlcore_tests.gpus import hide_gpus

    hide_gpus(config)
