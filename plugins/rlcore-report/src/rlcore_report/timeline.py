"""Recorded calls: which host ran what and when, who waited for whom, and their export as a trace for Perfetto.

Calls that overlap, as in a schedule that generates while it trains, are on different hosts, or in different lanes of one.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

CONTROLLER = "controller"
_SHORTEST_S = 1e-3
NOTHING = "no call"
"""Name of the time in which no host runs a call."""


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A call on one host, or the time that the controller waited for a call."""

    step: int
    kind: str
    """step, evaluation or checkpoint."""
    name: str
    """"role.method", or "weight sync"."""
    host: str
    """"POOL rank N", or "controller"."""
    begin: float
    """Seconds since 1970."""
    seconds: float

    @property
    def end(self) -> float:
        """Seconds since 1970."""
        return self.begin + self.seconds


def calls(rows: Iterable[Mapping[str, Any]]) -> list[RecordedCall]:
    """Return the calls in the lines of timeline.jsonl, in the order in which they began."""
    found = [
        RecordedCall(
            row["step"], row.get("kind", "step"), name, f"{pool} rank {rank}" if pool else CONTROLLER, begin, seconds
        )
        for row in rows
        for name, pool, rank, begin, seconds in row["calls"]
    ]
    return sorted(found, key=lambda call: call.begin)


def lanes(found: Sequence[RecordedCall]) -> list[int]:
    """Return the lane of each call within its host; calls of one lane do not overlap."""
    ends: dict[str, list[float]] = {}
    chosen = []
    for call in found:
        of_host = ends.setdefault(call.host, [])
        lane = next((i for i, end in enumerate(of_host) if end <= call.begin + _SHORTEST_S), len(of_host))
        of_host[lane : lane + 1] = [call.end]
        chosen.append(lane)
    return chosen


def waits(found: Sequence[RecordedCall]) -> dict[str, dict[str, float]]:
    """Return host -> {calls that ran elsewhere: seconds in which this host ran none}, from the first call to the last.

    Example: {"gpu rank 1": {"actor.update": 0.5, "no call": 0.1}}: rank 1 waited 0.5 s for slower ranks.
    """
    on_hosts = [call for call in found if call.host != CONTROLLER]
    idle: dict[str, dict[str, float]] = {call.host: {} for call in on_hosts}
    changes = [(call.begin, 1, call) for call in on_hosts] + [(call.end, -1, call) for call in on_hosts]
    running: Counter[tuple[str, str]] = Counter()
    for (time, change, call), (following, _, _) in pairwise(sorted(changes, key=lambda it: it[0])):
        running[call.host, call.name] += change
        running = +running  # without calls that have ended
        others = " + ".join(sorted({name for _, name in running})) or NOTHING
        for host in idle.keys() - {host for host, _ in running}:
            idle[host][others] = idle[host].get(others, 0.0) + following - time
    return {
        host: {name: found[name] for name in sorted(found, key=lambda it: -found[it]) if found[name] >= _SHORTEST_S}
        for host, found in idle.items()
    }


def write_trace(rows: Iterable[Mapping[str, Any]], path: Path) -> int:
    """Write a gzipped Chrome trace, which ui.perfetto.dev opens, with one process per host; return the number of calls."""
    found = calls(rows)
    number = {host: i for i, host in enumerate(sorted({call.host for call in found}), 1)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": host}} for host, pid in number.items()
    ]
    for call, lane in zip(found, lanes(found)):
        times = {"ts": round(call.begin * 1e6), "dur": round(call.seconds * 1e6)}
        name = f"waits for {call.name}" if call.host == CONTROLLER else call.name
        about = {"cat": call.kind, "args": {"step": call.step, "kind": call.kind}}
        events.append({"ph": "X", "pid": number[call.host], "tid": lane, "name": name, **times, **about})
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode(), mtime=0))
    return len(found)
