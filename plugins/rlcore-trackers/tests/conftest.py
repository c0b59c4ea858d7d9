"""Hide GPUs from these tests."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    from rlcore_tests.gpus import hide_gpus

    hide_gpus(config)
