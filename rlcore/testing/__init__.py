"""Contract suites for each kind of plugin, and fakes, for authors of plugins.

A suite is a class of pytest tests for the behavior on which the core relies. A subclass creates the plugin:

    from rlcore.testing import RolloutContract

    class TestMyEngine(RolloutContract):
        def make(self, model, context):
            return MyEngine(MyConfig(), model=model, context=context)

The suites need pytest; the fakes do not. Names are imported on first use. In addition, `rlcore.testing.training`
compares the ranks of a backend with `local`, and `rlcore.testing.runs` configures small runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlcore.testing.algorithm import AlgorithmContract
    from rlcore.testing.backend import BackendContract
    from rlcore.testing.dataset import DatasetContract
    from rlcore.testing.dispatch import DispatchContract, RowDispatchContract
    from rlcore.testing.environment import EnvironmentContract
    from rlcore.testing.fakes import FakeConfig, FakeRoles, FakeRollout
    from rlcore.testing.ranks import run_ranks
    from rlcore.testing.reward import RewardContract
    from rlcore.testing.rollout import ModelRolloutContract, RolloutContract
    from rlcore.testing.tracker import TrackerContract

_HOME = {
    "AlgorithmContract": "algorithm",
    "BackendContract": "backend",
    "DatasetContract": "dataset",
    "DispatchContract": "dispatch",
    "EnvironmentContract": "environment",
    "FakeConfig": "fakes",
    "FakeRoles": "fakes",
    "FakeRollout": "fakes",
    "ModelRolloutContract": "rollout",
    "RewardContract": "reward",
    "RolloutContract": "rollout",
    "RowDispatchContract": "dispatch",
    "TrackerContract": "tracker",
    "run_ranks": "ranks",
}

__all__ = [
    "AlgorithmContract",
    "BackendContract",
    "DatasetContract",
    "DispatchContract",
    "EnvironmentContract",
    "FakeConfig",
    "FakeRoles",
    "FakeRollout",
    "ModelRolloutContract",
    "RewardContract",
    "RolloutContract",
    "RowDispatchContract",
    "TrackerContract",
    "run_ranks",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
