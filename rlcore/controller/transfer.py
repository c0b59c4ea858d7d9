"""Ways of weights from a trained role to the rollout.

`inprocess` hands tensors over one by one inside a host that carries both. To another pool, `object_store` leaves them in
the runtime's store, and `collective` broadcasts them in a process group of its own; both a bucket at a time, in the type in
which they come. The rollout commits the version only when all has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlcore.controller import weights
from rlcore.controller.group import Group
from rlcore.errors import ConfigError

_ABANDON_S = 10.0
"""For telling hosts that an update failed. Those that are busy hear it later: the calls of a host run in order."""


class _Way:
    """A way between two groups."""

    def __init__(self, *, source: Group, target: Group) -> None:
        self._source = source
        self._target = target

    def send(self, version: int) -> None:
        """All ranks get it, or none serves: one that has all of it already would draw from another policy than the rest."""
        try:
            self._send(version)
        except Exception as error:
            try:
                self._abandon(version)
            except Exception as second:
                error.add_note(f"besides, while the others were told: {second}")
            raise

    def _abandon(self, version: int) -> None:
        runtime, role = self._target.runtime, self._target.role
        timeout_s = min(_ABANDON_S, runtime.config.call_timeout_s)
        groups = {group.pool: group for group in (self._source, self._target)}.values()
        handles = [it for group in groups for it in _submit(group, "abandon_weights", role, version, timeout_s)]
        runtime.wait(handles, "weight sync", timeout_s)

    def _send(self, version: int) -> None:
        raise NotImplementedError


class InProcess(_Way):
    """Both roles on the same hosts: rank r of the rollout gets the tensors of rank r of the source."""

    def __init__(self, *, source: Group, target: Group) -> None:
        if source.pool != target.pool:
            raise ConfigError(
                f"transfer=inprocess needs both roles in one pool; '{source.role}' is in '{source.pool}',"
                f" '{target.role}' in '{target.pool}'.\nType  transfer=object_store"
            )
        super().__init__(source=source, target=target)

    def _send(self, version: int) -> None:
        _wait(self._target, _submit(self._target, "hand_over", self._source.role, self._target.role, version))


class ObjectStore(_Way):
    """Rank 0 of the source leaves a bucket in the store, and every rank of the target maps it while the next is made."""

    def _send(self, version: int) -> None:
        source, target, timeout_s = self._source, self._target, self._target.runtime.config.call_timeout_s
        refs, more = _wait(source, self._publish())[0]
        while True:
            coming = self._publish() if more else []
            reading = _submit(target, "receive_weights", target.role, refs, version, timeout_s)
            replies = _wait(source, [*coming, *reading])
            if not more:
                break
            refs, more = replies[0]
        _wait(target, _submit(target, "end_weights"))

    def _publish(self) -> list[Any]:
        return _submit(self._source, "publish_weights", self._source.role, weights.BUCKET_BYTES)


class Collective(_Way):
    """Rank 0 of the source broadcasts to every rank of the target; their process group is built once. NCCL on GPUs."""

    def __init__(self, *, source: Group, target: Group) -> None:
        if source.pool == target.pool or source.runtime.config.name == "local":
            here = "both are in one pool" if source.pool == target.pool else "with runtime=local there is one process"
            way = "inprocess" if source.pool == target.pool else "object_store"
            raise ConfigError(
                f"transfer=collective is for '{source.role}' and '{target.role}' in pools of their own, and {here}\n"
                f"Type  transfer={way}"
            )
        super().__init__(source=source, target=target)
        self._has_group = False

    def _send(self, version: int) -> None:
        if not self._has_group:
            self._meet()
        sending = _submit(self._source, "send_weights", self._source.role, weights.BUCKET_BYTES)
        taking = _submit(self._target, "take_weights", self._target.role, version)
        _wait(self._target, [*sending, *taking])

    def _meet(self) -> None:
        runtime, pool = self._source.runtime, self._source.pool
        timeout_s = runtime.config.call_timeout_s
        address = runtime.address(pool)
        port = runtime.wait([runtime.submit(pool, 0, "open_broadcast", address)], "weight sync", timeout_s)[0].value
        places = [(pool, 0), *((self._target.pool, rank) for rank in range(len(self._target.meshes)))]
        handles = [
            runtime.submit(pool, number, "join_broadcast", address, port, rank, len(places), timeout_s)
            for rank, (pool, number) in enumerate(places)
        ]
        _wait(self._source, handles)
        self._has_group = True


def _submit(group: Group, action: str, *args: Any) -> list[Any]:
    """Start an action of every host of a group's pool."""
    return [group.runtime.submit(group.pool, rank, action, *args) for rank in range(len(group.meshes))]


def _wait(group: Group, handles: Sequence[Any]) -> list[Any]:
    """What the actions answered; the slowest counts as the time of the sync."""
    runtime = group.runtime
    replies = runtime.wait(handles, "weight sync", runtime.config.call_timeout_s)
    busy = runtime.traffic.busy_s
    busy["weight sync"] = busy.get("weight sync", 0.0) + max(reply.seconds for reply in replies)
    return [reply.value for reply in replies]
