"""`Transfer`: sends weights from a trained role to the rollout; built-in ones are in `rlcore.controller.transfer`."""

from __future__ import annotations

from typing import Any, Protocol


class Transfer(Protocol):
    """A weight-transfer method. Created once per run, on the controller."""

    def __init__(self, *, source: Any, target: Any) -> None:
        """Connect `source`, the group of the trained role, to `target`, that of the rollout.

        If this method cannot connect them, raise a ConfigError that names one that can."""

    def send(self, version: int) -> None:
        """Send all weights of `source` to every rank of `target` as `version`; if it raises, no rank serves them."""
