"""`Transfer`: sends weights from one role to another; built-in ones are in `rlcore.controller.transfer`."""

from __future__ import annotations

from typing import Any, Protocol


class Transfer(Protocol):
    """A weight-transfer method. One instance per pair of roles, on the controller."""

    def __init__(self, *, source: Any, target: Any) -> None:
        """Connect `source`, the group of a role with a model, to `target`, that of the rollout or of another model.

        If this method cannot connect them, raise a ConfigError that names one that can."""

    def send(self, version: int, mix: float = 1.0) -> None:
        """Send all weights of `source` to `target.ranks` as `version`; if it raises, no rank serves them.

        `mix` is for a target with a model, which keeps 1 - mix of its own weights; a rollout always gets mix=1."""
