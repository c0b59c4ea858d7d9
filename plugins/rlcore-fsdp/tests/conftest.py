"""Shared by the tests of this plugin."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from pathlib import Path

import pytest


def pytest_configure(config):
    from rlcore.testing.gpus import hide_gpus

    hide_gpus(config)


ASSETS = Path(os.environ.get("RLCORE_TEST_ASSETS", Path(__file__).parents[4] / "shared"))


@pytest.fixture(scope="session")
def assets() -> Path:
    """Folder with models/stories260k; set RLCORE_TEST_ASSETS to where yours is."""
    if not (ASSETS / "models" / "stories260k").is_dir():
        pytest.skip(f"no test assets in {ASSETS}; set RLCORE_TEST_ASSETS to a folder with models/")
    return ASSETS
