"""`Record`: what calls took, moved and measured. Each step and each evaluation has its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from rlcore.controller.host import Reply
from rlcore.types import CallTime, Mean, Metrics


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
    calls: list[CallTime] = field(default_factory=list)
    """Times of the calls on each rank, and of the controller's waits for them."""
    on_wait: Callable[[str], None] | None = None
    """Called with "role.method" when the controller begins to wait for it."""
    while_waiting: Callable[[], None] | None = None
    """Called about once per second while the controller waits for a call; it must not wait itself."""

    def note(self, name: str, total: float, weight: float = 1.0) -> None:
        """Add a metric whose value is the sum of the totals over the sum of the weights."""
        self.metrics[name] = self.metrics.get(name, Mean(0.0, 0.0)) + Mean(float(total), float(weight))

    def include(self, other: Record) -> None:
        """Add the costs of calls that were noted elsewhere."""
        self.blocked_s += other.blocked_s
        self.num_bytes += other.num_bytes
        self.calls += other.calls
        for what, seconds in other.busy_s.items():
            self.spent(what, seconds)

    def spent(self, what: str, seconds: float) -> None:
        """Add time that the slowest rank spent in a call."""
        self.busy_s[what] = self.busy_s.get(what, 0.0) + seconds

    def ran(self, what: str, pool: str, replies: Mapping[int, Reply], submitted: float, waiting: float) -> None:
        """Note when a call ran on each rank.

        A clock of another machine may differ, so a call is moved between its submission and its reply.

        Args:
            submitted: when the call was submitted, in seconds since 1970, as the next one.
            waiting: when the controller began to wait for the call.
        """
        now = time.time()
        self.spent(what, max((reply.seconds for reply in replies.values()), default=0.0))
        self.calls.append(CallTime(what, "", 0, waiting, now - waiting))
        for rank, reply in replies.items():
            begin = max(submitted, min(reply.begin, now - reply.seconds))
            self.calls.append(CallTime(what, pool, rank, begin, reply.seconds))

    def sent(self, what: str, ranks: Mapping[str, Sequence[int]], seconds: float) -> None:
        """Note a transfer that has just ended; these ranks of each pool took part in it."""
        self.spent(what, seconds)
        places = [("", 0), *((pool, rank) for pool, taking in ranks.items() for rank in taking)]
        begin = time.time() - seconds
        self.calls += [CallTime(what, pool, rank, begin, seconds) for pool, rank in places]

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Count the time of this block as waiting for hosts."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.blocked_s += time.perf_counter() - start
