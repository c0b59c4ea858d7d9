"""Interfaces of plugins, one Protocol per kind; the registry checks plugins against `PROTOCOLS`."""

from rlcore.protocols.algorithm import Algorithm, RoleSpec, Unit
from rlcore.protocols.backend import Backend, BackendContext, ModelConfig, OptimizerConfig
from rlcore.protocols.dataset import Dataset
from rlcore.protocols.dispatch import Call, Dispatch
from rlcore.protocols.environment import Completion, Environment, EpisodeConfig, Step
from rlcore.protocols.reward import Reward, RewardResult, batched
from rlcore.protocols.roles import Roles
from rlcore.protocols.rollout import Rollout, RolloutContext
from rlcore.protocols.tracker import Tracker
from rlcore.protocols.transfer import Transfer
from rlcore.protocols.worker import Worker, WorkerContext

PROTOCOLS: dict[str, type] = {
    "backend": Backend,
    "rollout": Rollout,
    "algorithm": Algorithm,
    "dispatch": Dispatch,
    "dataset": Dataset,
    "environment": Environment,
    "reward": Reward,
    "tracker": Tracker,
    "transfer": Transfer,
    "worker": Worker,
}

__all__ = [
    "PROTOCOLS",
    "Algorithm",
    "Backend",
    "BackendContext",
    "Call",
    "Completion",
    "Dataset",
    "Dispatch",
    "Environment",
    "EpisodeConfig",
    "ModelConfig",
    "OptimizerConfig",
    "Reward",
    "RewardResult",
    "RoleSpec",
    "Roles",
    "Rollout",
    "RolloutContext",
    "Step",
    "Tracker",
    "Transfer",
    "Unit",
    "Worker",
    "WorkerContext",
    "batched",
]
