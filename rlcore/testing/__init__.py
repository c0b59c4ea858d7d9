"""Contract suites for each kind of plugin, and fakes, for authors of plugins.

A suite is a class of pytest tests for the behavior on which the core relies. A subclass creates the plugin:

    from rlcore.testing import RolloutContract

    class TestMyEngine(RolloutContract):
        def make(self, model, context):
            return MyEngine(MyConfig(), model=model, context=context)

The suites need pytest; the fakes do not. Names are imported on first use. In addition, `rlcore.testing.training`
compares the ranks of a backend with `local`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlcore.testing.algorithm import AlgorithmContract as AlgorithmContract
    from rlcore.testing.backend import BackendContract as BackendContract
    from rlcore.testing.dataset import DatasetContract as DatasetContract
    from rlcore.testing.dispatch import DispatchContract as DispatchContract
    from rlcore.testing.dispatch import RowDispatchContract as RowDispatchContract
    from rlcore.testing.environment import EnvironmentContract as EnvironmentContract
    from rlcore.testing.fakes import FakeConfig as FakeConfig
    from rlcore.testing.fakes import FakeRoles as FakeRoles
    from rlcore.testing.fakes import FakeRollout as FakeRollout
    from rlcore.testing.ranks import run_ranks as run_ranks
    from rlcore.testing.reward import RewardContract as RewardContract
    from rlcore.testing.rollout import ModelRolloutContract as ModelRolloutContract
    from rlcore.testing.rollout import RolloutContract as RolloutContract
    from rlcore.testing.tracker import TrackerContract as TrackerContract

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

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
