"""`Roles`: the worker groups of a run, for `collect` and `update` of an algorithm.

`rlcore.protocols.groups` lists the methods of each group. Batches that groups return are references with the operations
of a `Batch`: large columns stay in the process that created them, and `fetch` returns the named ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from rlcore.types import Mean, Sampling

if TYPE_CHECKING:
    from rlcore.data.batch import Batch
    from rlcore.protocols.groups import ActorGroup, CriticGroup, ReferenceGroup, RewardGroup, RolloutGroup
    from rlcore.protocols.reward import RewardSpec

WorkerType = TypeVar("WorkerType")


class Roles(Protocol):
    """Groups by role name. A role that the algorithm did not request raises AttributeError.

    `rlcore.testing.fakes.FakeRoles` is a complete implementation for tests.
    """

    sampling: Sampling
    """Sampling parameters for training."""
    samples_per_prompt: int
    rewards: Sequence[RewardSpec]
    """The rewards of the run, in the order of the config."""

    @property
    def actor(self) -> ActorGroup:
        """The trained policy."""

    @property
    def reference(self) -> ReferenceGroup:
        """The frozen initial policy."""

    @property
    def critic(self) -> CriticGroup:
        """The value model of PPO."""

    @property
    def rollout(self) -> RolloutGroup:
        """The inference engines."""

    @property
    def reward(self) -> RewardGroup:
        """The processes that score samples."""

    def has(self, name: str) -> bool:
        """Return whether the run has this role."""

    def group(self, name: str, worker: type[WorkerType]) -> WorkerType:
        """Return the group of any other role, typed as its worker class.

        Example: `teacher = roles.group("teacher", ReferenceWorker)`

        Raises:
            AttributeError: the run has no role of this name.
            TypeError: the role has workers of another class.
        """

    def generate(self, prompts: Batch, rollout: str = "rollout") -> Batch:
        """Sample `samples_per_prompt` responses for each prompt, adjacent and in prompt order.

        Args:
            rollout: role of the engine, for algorithms with several."""

    def more_prompts(self, count: int) -> Batch:
        """Return further prompts for this step, for example to replace groups without variance."""

    def demonstrations(self, prompts: Batch, columns: Sequence[str]) -> Batch:
        """Return samples whose responses are texts from the data, one per column, in prompt order.

        They have the columns of `generate` except rollout_log_probs, token_version, policy_version and first_version."""

    def score(self, samples: Batch) -> Batch:
        """Add rewards. Samples without one are dropped and counted, or end the run (`reward.on_error`)."""

    def compute_rewards(self, samples: Batch) -> Batch:
        """Add the results of the reward model and the rewards, and keep every row."""

    def note(self, name: str, mean: Mean) -> None:
        """Add a metric of this step; means that are noted under one name are merged."""

    def send(self, source: str, target: str, mix: float = 1.0) -> None:
        """Set each parameter p of the model `target` to (1 - mix) · p + mix · the parameter of `source`.

        `target` declares `weights_from` in its `RoleSpec`. mix=1 copies exactly.

        Raises:
            AttributeError: the run has no such role.
            ConfigError: `target` does not receive the weights of `source`.
        """
