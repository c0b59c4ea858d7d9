"""Environment variables of all tests, set before anything is imported: one thread per process."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_configure(config):
    from rlcore_tests.gpus import hide_gpus

    hide_gpus(config)
