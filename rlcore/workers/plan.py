"""The parts of a planned run that a worker class sees, and its memory estimate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from rlcore.config.schema import Config
    from rlcore.protocols.algorithm import RoleSpec
    from rlcore.protocols.reward import RewardSpec
    from rlcore.registry import Resolved


class ChosenPlugin(Protocol):
    """A plugin of a run with its settings."""

    @property
    def resolved(self) -> Resolved:
        """The plugin's class, and the `spec` from which hosts import it."""

    @property
    def config(self) -> Any:
        """Settings of the plugin, an instance of its `Config`."""


class RunPlan(Protocol):
    """A planned run, from which worker classes build their options and estimates."""

    @property
    def config(self) -> Config:
        """The composed config."""

    @property
    def roles(self) -> Mapping[str, RoleSpec]:
        """Role -> specification, with all defaults filled in."""

    @property
    def models(self) -> Mapping[str, str]:
        """Role -> directory of its model."""

    @property
    def backend(self) -> ChosenPlugin:
        """The training backend."""

    @property
    def rollout(self) -> ChosenPlugin:
        """The inference engine."""

    @property
    def algorithm(self) -> ChosenPlugin:
        """The algorithm."""

    @property
    def environment(self) -> ChosenPlugin | None:
        """The environment, if any."""

    @property
    def rewards(self) -> Sequence[RewardSpec]:
        """The rewards, in the order of the config."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFacts:
    """Facts about a role's pool before the start."""

    num_devices: int = 1
    device: Literal["cpu", "cuda"] = "cpu"
    device_bytes: int = 0
    """Memory of one device; 0 if unknown."""
    own_python: bool = False
    """True if its hosts run in another Python, whose plugins cannot be asked here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleMemory:
    """Estimated memory of one worker of a role, in bytes."""

    device: int = 0
    """Memory on the worker's device."""
    offloaded: int = 0
    """Host memory while other workers use the device."""
