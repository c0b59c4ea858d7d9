"""`Dispatch`: splits the arguments of a group call over its ranks and combines the results.

A custom mode is a class with these two methods, registered under `rlcore.dispatch`; `rlcore.controller.dispatch`
has the built-in ones. It runs on the controller; batches in the arguments are references, so splitting moves no data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlcore.types import Mesh


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one call. Example: Call((batch,), {"temperature": 1.0})"""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


class Dispatch(Protocol):
    """A dispatch mode."""

    def split(self, call: Call, meshes: Sequence[Mesh]) -> Sequence[Call | None]:
        """Return one call for each rank, in rank order; None: this rank is not called."""

    def collect(self, outputs: Sequence[Any], meshes: Sequence[Mesh]) -> Any:
        """Combine the outputs, in rank order, into one result; a rank that was not called has None."""
