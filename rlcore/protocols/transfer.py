"""`Transfer`: how weights travel from a trained role to the rollout; `rlcore.controller.transfer` has the built-in ones."""

from __future__ import annotations

from typing import Any, Protocol


class Transfer(Protocol):
    """A way of weights. Made once per run, on the controller."""

    def __init__(self, *, source: Any, target: Any) -> None:
        """`source` is the group of the trained role, `target` that of the rollout.

        Raise ConfigError when this way cannot connect them, with the one that can."""

    def send(self, version: int) -> None:
        """Bring all weights of `source` to every rank of `target` as `version`, or raise; then no rank serves it."""
