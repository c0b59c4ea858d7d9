"""Options of a rollout worker that runs episodes; the package rlcore-environments has the worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlcore.protocols.environment import EpisodeConfig
from rlcore.registry import PluginSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeOptions:
    """Options of the rollout worker for the environment; plain data, because it travels to the hosts."""

    environment: PluginSpec
    settings: Any
    """Settings of the environment."""
    limits: EpisodeConfig
    template: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template that the settings choose."""
    context_length: int
    """Context length of the model, in tokens."""

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens in a conversation."""
        return min(self.limits.max_tokens or self.context_length, self.context_length)
