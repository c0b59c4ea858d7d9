"""rlcore: reinforcement-learning post-training of language models, a slim core with plugins.

Importing it is cheap: public names are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlcore.version import __version__

if TYPE_CHECKING:
    from rlcore.api.evaluate import evaluate as evaluate
    from rlcore.api.rollout import rollout as rollout
    from rlcore.api.run import launch as launch
    from rlcore.api.run import plan as plan
    from rlcore.api.run import train as train
    from rlcore.controller.dispatch import dispatch as dispatch
    from rlcore.data.batch import Batch as Batch
    from rlcore.hooks import hookimpl as hookimpl
    from rlcore.protocols.environment import Completion as Completion
    from rlcore.protocols.environment import Step as Step
    from rlcore.protocols.reward import RewardResult as RewardResult
    from rlcore.protocols.reward import batched as batched
    from rlcore.registry.catalog import catalog as catalog
    from rlcore.registry.resolve import resolve as resolve
    from rlcore.types import LossTerms as LossTerms
    from rlcore.types import Mesh as Mesh
    from rlcore.types import Request as Request
    from rlcore.types import Sample as Sample
    from rlcore.types import Sampling as Sampling
    from rlcore.types import TokenOutputs as TokenOutputs
    from rlcore.workers.base import Worker as Worker

_HOMES = {
    "Batch": "rlcore.data.batch",
    "Completion": "rlcore.protocols.environment",
    "LossTerms": "rlcore.types",
    "Mesh": "rlcore.types",
    "Request": "rlcore.types",
    "RewardResult": "rlcore.protocols.reward",
    "Sample": "rlcore.types",
    "Sampling": "rlcore.types",
    "Step": "rlcore.protocols.environment",
    "TokenOutputs": "rlcore.types",
    "Worker": "rlcore.workers.base",
    "batched": "rlcore.protocols.reward",
    "catalog": "rlcore.registry.catalog",
    "dispatch": "rlcore.controller.dispatch",
    "evaluate": "rlcore.api.evaluate",
    "hookimpl": "rlcore.hooks",
    "launch": "rlcore.api.run",
    "plan": "rlcore.api.run",
    "resolve": "rlcore.registry.resolve",
    "rollout": "rlcore.api.rollout",
    "train": "rlcore.api.run",
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rlcore' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
