"""The rule of asynchronous training: which groups are requested, and which of them a step takes.

Pure: no clock, no engine, no samples of its own. With P groups per step, A steps ahead and a staleness of at most k:

1. Step n takes `count` groups once count + A · P are requested. New ones have the deadline n + k, because the weights
   of version n - 1 draw their first token.
2. It takes the first `count` finished groups, by deadline and position, once the i-th group that remains (from 0) can
   still be trained on in step n + 1 + i // P. With A = k it waits for the groups in this order.

Taking in order lowers the place of every remaining group by at least P, and a new group is at place
count + A · P - 1 or before. As A <= k, waiting for the first groups is always enough. It follows that no group is
trained on after its deadline, none is dropped, and no wait lasts while all requested groups are finished.

A group whose engine failed is requested again in a step m, like a new one: its deadline becomes m + k, and the others
move to the front.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from rlcore.data.batch import Batch


@dataclass(slots=True, kw_only=True, eq=False)
class PendingGroup:
    """A group that was requested and that no step has taken."""

    position: int
    """Position of its prompt in the order of the loader."""
    deadline_step: int
    """The last step that may train on it."""
    samples: Batch | None = None
    """Rows of finished groups, this one among them; None while it is being generated."""
    row: int = 0
    """Its first row in `samples`."""


class Window:
    """The groups that are requested and not yet taken, those with the earliest deadline first."""

    def __init__(self, *, per_step: int, steps_ahead: int, max_staleness: int) -> None:
        assert 0 <= steps_ahead <= max_staleness, f"{steps_ahead} steps ahead, staleness at most {max_staleness}"
        self.pending: list[PendingGroup] = []
        self.per_step, self.steps_ahead, self.max_staleness = per_step, steps_ahead, max_staleness

    @property
    def num_finished(self) -> int:
        """Number of groups whose samples have arrived."""
        return sum(it.samples is not None for it in self.pending)

    @property
    def first_open(self) -> PendingGroup:
        """The first group that is being generated."""
        return next(it for it in self.pending if it.samples is None)

    def num_missing(self, count: int, steps_ahead: int) -> int:
        """Return how many groups to request before `count` are taken; fewer steps ahead at the end of a run."""
        return max(0, count + min(self.steps_ahead, steps_ahead) * self.per_step - len(self.pending))

    def add(self, positions: Iterable[int], step: int) -> list[PendingGroup]:
        """Add groups that are requested in this step, before its update."""
        new = [PendingGroup(position=it, deadline_step=step + self.max_staleness) for it in positions]
        self.pending += new
        return new

    def request_again(self, positions: Collection[int], step: int) -> None:
        """Give groups that are requested again in this step the deadline of new ones, which is later than their own."""
        for group in self.pending:
            if group.position in positions:
                group.deadline_step = step + self.max_staleness
        self.put_back(())

    def put_back(self, groups: Iterable[PendingGroup]) -> None:
        """Add groups that a checkpoint contains."""
        self.pending = sorted([*self.pending, *groups], key=lambda it: (it.deadline_step, it.position))

    def choose(self, count: int, step: int) -> list[PendingGroup] | None:
        """Take `count` groups for this step; None if it has to wait for more groups to finish."""
        if self.steps_ahead == self.max_staleness:
            chosen = self.pending[:count] if all(it.samples is not None for it in self.pending[:count]) else []
        else:
            chosen = [it for it in self.pending if it.samples is not None][:count]
        taken = {it.position for it in chosen}
        rest = [it for it in self.pending if it.position not in taken]
        if len(chosen) < count or not self.is_in_time(rest, step + 1):
            return None
        self.pending = rest
        return chosen

    def is_in_time(self, groups: Sequence[PendingGroup], step: int) -> bool:
        """Return whether all groups, in this order, can be trained on by their deadlines from this step on."""
        return all(step + place // self.per_step <= it.deadline_step for place, it in enumerate(groups))


def num_before(chosen: Sequence[PendingGroup], rest: Iterable[PendingGroup]) -> int:
    """Return how many groups of `rest` one that was chosen has overtaken."""
    last = max((it.deadline_step, it.position) for it in chosen)
    return sum((it.deadline_step, it.position) < last for it in rest)
