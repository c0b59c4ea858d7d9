"""Ways of weights from a trained role to the rollout.

`inprocess` hands tensors over one by one inside a host that carries both. `object_store` leaves them in the runtime's
store for another pool: one whole copy of the parameters, in the type in which they are trained, lies there until every
rank has read it. Either way the rollout commits the version only when all has arrived.
"""

from __future__ import annotations

from typing import Any

from rlcore.controller.group import Group
from rlcore.errors import ConfigError


class InProcess:
    """Both roles on the same hosts: rank r of the rollout gets the tensors of rank r of the source."""

    def __init__(self, *, source: Group, target: Group) -> None:
        if source.pool != target.pool:
            raise ConfigError(
                f"transfer=inprocess needs both roles in one pool; '{source.role}' is in '{source.pool}',"
                f" '{target.role}' in '{target.pool}'.\nType  transfer=object_store"
            )
        self._source = source
        self._target = target

    def send(self, version: int) -> None:
        _everywhere(self._target, "hand_over", self._source.role, self._target.role, version)


class ObjectStore:
    """Rank 0 of the source leaves its tensors in the store, and every rank of the target maps them."""

    def __init__(self, *, source: Group, target: Group) -> None:
        self._source = source
        self._target = target

    def send(self, version: int) -> None:
        refs = _everywhere(self._source, "publish_weights", self._source.role)[0]
        _everywhere(self._target, "receive_weights", self._target.role, refs, version)


def _everywhere(group: Group, action: str, *args: Any) -> list[Any]:
    """Call an action of every host of a group's pool."""
    runtime = group.runtime
    handles = [runtime.submit(group.pool, rank, action, *args) for rank in range(len(group.meshes))]
    replies = runtime.wait(handles, "weight sync", runtime.config.call_timeout_s)
    busy = runtime.traffic.busy_s
    busy["weight sync"] = busy.get("weight sync", 0.0) + max(reply.seconds for reply in replies)
    return [reply.value for reply in replies]
