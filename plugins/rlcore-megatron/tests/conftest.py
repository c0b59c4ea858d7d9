"""Fixtures shared by the tests of this plugin."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_configure(config):
    """Hide GPUs, and turn warnings into errors, except those that megatron-core causes itself."""
    from rlcore_tests.gpus import hide_gpus

    hide_gpus(config)
    for kind in ("DeprecationWarning", "UserWarning"):
        config.addinivalue_line("filterwarnings", rf"ignore::{kind}:megatron\.")
    config.addinivalue_line("filterwarnings", r"ignore:`torch\.distributed\.\w+` is deprecated:FutureWarning")
