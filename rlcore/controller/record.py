"""`Record`: what calls took, moved and measured. Each step and each evaluation has its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rlcore.types import Mean, Metrics


@dataclass(slots=True, kw_only=True)
class Record:
    """Costs and metrics of some calls. Calls that overlap are counted once in `blocked_s`."""

    metrics: Metrics = field(default_factory=dict)
    """Means over everything that was noted under a name."""
    busy_s: dict[str, float] = field(default_factory=dict)
    """Seconds that the slowest rank spent, by "role.method"."""
    blocked_s: float = 0.0
    """Seconds in which the controller waited for hosts."""
    num_bytes: int = 0
    """Bytes of batches in the messages of all ranks: lengths, row columns, row orders and references."""
    on_wait: Callable[[str], None] | None = None
    """Called with "role.method" when the controller begins to wait for it."""

    def note(self, name: str, total: float, weight: float = 1.0) -> None:
        """Add a metric whose value is the sum of the totals over the sum of the weights."""
        self.metrics[name] = self.metrics.get(name, Mean(0.0, 0.0)) + Mean(float(total), float(weight))

    def spent(self, what: str, seconds: float) -> None:
        """Add time that the slowest rank spent in a call."""
        self.busy_s[what] = self.busy_s.get(what, 0.0) + seconds

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Count the time of this block as waiting for hosts."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.blocked_s += time.perf_counter() - start
