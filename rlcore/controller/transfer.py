"""Weight-transfer methods from a trained role to the rollout, or to another role with a model.

`inprocess` passes tensors one by one inside a host that has both roles. Between pools, `object_store` puts them in the
runtime's store, and `collective` broadcasts them in its own process group; both send buckets in the original dtype. The
target commits the version only when all weights have arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlcore.controller import weights
from rlcore.controller.group import Group
from rlcore.errors import ConfigError

_ABANDON_S = 10.0
"""Limit for notifying hosts that an update failed. Busy hosts handle it later: a host runs its calls in order."""


class _WeightTransfer:
    """A weight transfer between two groups."""

    def __init__(self, *, source: Group, target: Group) -> None:
        self._source = source
        self._target = target

    def send(self, version: int, mix: float = 1.0) -> None:
        """Send the weights to all ranks. If that fails, none of them serves, so that no two sample different policies.

        A target with a model sets each of its parameters p to (1 - mix) · p + mix · new.
        """
        try:
            self._send(version, mix)
        except Exception as error:
            try:
                self._abandon(version)
            except Exception as second:
                error.add_note(f"while notifying the other ranks of this error: {second}")
            raise

    def _sampled(self, version: int) -> int | None:
        """Return the version if the target samples with the weights, else None."""
        worker_class: Any = self._target.worker_class
        return version if worker_class.updated_every_step else None

    def _abandon(self, version: int) -> None:
        runtime, role = self._target.runtime, self._target.role
        timeout_s = min(_ABANDON_S, runtime.config.call_timeout_s)
        groups = {group.pool: group for group in (self._source, self._target)}.values()
        handles = [it for group in groups for it in _submit(group, "abandon_weights", role, version, timeout_s)]
        runtime.wait(handles, "weight sync", timeout_s)

    def _send(self, version: int, mix: float) -> None:
        raise NotImplementedError


class InProcess(_WeightTransfer):
    """Transfer between roles on the same hosts: rank r of the rollout gets the tensors of rank r of the source."""

    def __init__(self, *, source: Group, target: Group) -> None:
        if source.pool != target.pool:
            raise ConfigError(
                f"transfer=inprocess needs both roles in one pool; '{source.role}' is in '{source.pool}',"
                f" '{target.role}' in '{target.pool}'.\nType  transfer=object_store"
            )
        super().__init__(source=source, target=target)

    def _send(self, version: int, mix: float) -> None:
        roles = self._source.role, self._target.role
        _wait(self._target, _submit(self._target, "hand_over", *roles, version, mix, self._sampled(version)))


class ObjectStore(_WeightTransfer):
    """Transfer through the store: all target ranks map a bucket while rank 0 of the source prepares the next."""

    def _send(self, version: int, mix: float) -> None:
        source, target, timeout_s = self._source, self._target, self._target.runtime.config.call_timeout_s
        refs, more = _wait(source, self._publish(version))[0]
        while True:
            publishing = self._publish(version) if more else []
            receiving = _submit(target, "receive_weights", target.role, refs, version, timeout_s, mix)
            replies = _wait(source, [*publishing, *receiving])
            if not more:
                break
            refs, more = replies[0]
        _wait(target, _submit(target, "end_weights"))

    def _publish(self, version: int) -> list[Any]:
        options = weights.BUCKET_BYTES, self._sampled(version)
        return _submit(self._source, "publish_weights", self._source.role, *options)


class Collective(_WeightTransfer):
    """Broadcast from rank 0 of the source to every target rank, in a process group created once; NCCL on GPUs."""

    def __init__(self, *, source: Group, target: Group) -> None:
        if source.pool == target.pool or source.runtime.config.name == "local":
            reason = "both are in one pool" if source.pool == target.pool else "runtime=local has only one process"
            method = "inprocess" if source.pool == target.pool else "object_store"
            raise ConfigError(
                f"transfer=collective needs '{source.role}' and '{target.role}' in separate pools, but {reason}\n"
                f"Type  transfer={method}"
            )
        super().__init__(source=source, target=target)
        self._route = f"{source.role} to {target.role}"
        self._has_group = False

    def _send(self, version: int, mix: float) -> None:
        if not self._has_group:
            self._meet()
        options = weights.BUCKET_BYTES, self._sampled(version)
        sending = _submit(self._source, "send_weights", self._route, self._source.role, *options)
        taking = _submit(self._target, "take_weights", self._route, self._target.role, version, mix)
        _wait(self._target, [*sending, *taking])

    def _meet(self) -> None:
        runtime, pool = self._source.runtime, self._source.pool
        timeout_s = runtime.config.call_timeout_s
        address = runtime.address(pool)
        port = runtime.wait([runtime.submit(pool, 0, "open_broadcast", address)], "weight sync", timeout_s)[0].value
        places = [(pool, 0), *((self._target.pool, rank) for rank in range(len(self._target.meshes)))]
        handles = [
            runtime.submit(pool, number, "join_broadcast", self._route, address, port, rank, len(places), timeout_s)
            for rank, (pool, number) in enumerate(places)
        ]
        _wait(self._source, handles)
        self._has_group = True


def _submit(group: Group, action: str, *args: Any) -> list[Any]:
    """Start an action on every host of a group's pool."""
    return [group.runtime.submit(group.pool, rank, action, *args) for rank in range(len(group.meshes))]


def _wait(group: Group, handles: Sequence[Any]) -> list[Any]:
    """Return the results of the actions."""
    runtime = group.runtime
    return [reply.value for reply in runtime.wait(handles, "weight sync", runtime.config.call_timeout_s)]
