"""Weight-transfer methods from a trained role to the rollout, or to another role with a model.

`inprocess` passes tensors one by one inside a host that has both roles. Between pools, `object_store` puts them in the
runtime's store, and `collective` broadcasts them in its own process group; both send buckets in the original dtype. The
target commits the version only when all weights have arrived.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlcore.controller import weights
from rlcore.controller.group import Group
from rlcore.errors import ConfigError, DeadlineExceeded, HostDied, InfrastructureError

_ABANDON_S = 10.0
"""Limit for notifying hosts that an update failed. Busy hosts handle it later: a host runs its calls in order."""
_BROKEN = """\
With transfer=collective, the other engines cannot receive these weights: they are in one process group with this host.
To go on without an engine that dies during an update, type  transfer=object_store"""


class _WeightTransfer:
    """A weight transfer between two groups."""

    def __init__(self, *, source: Group, target: Group) -> None:
        self._source = source
        self._target = target

    def send(self, version: int, mix: float = 1.0) -> None:
        """Send the weights to all ranks. If that fails, none of them serves, so that no two sample different policies.
        An engine that fails alone is left out, if the group allows it.

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
        submitted = [_submit(group, "abandon_weights", role, version, timeout_s) for group in groups]
        handles = [handle for by_rank in submitted for handle in by_rank.values()]
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
            publishing = self._publish(version) if more else {}
            receiving = _submit(target, "receive_weights", target.role, refs, version, timeout_s, mix)
            published = _wait(source, publishing)
            _wait(target, receiving)
            if not more:
                break
            refs, more = published[0]
        _wait(target, _submit(target, "end_weights"))

    def _publish(self, version: int) -> dict[int, Any]:
        options = weights.BUCKET_BYTES, self._sampled(version)
        return _submit(self._source, "publish_weights", self._source.role, *options)


class Collective(_WeightTransfer):
    """Broadcast from rank 0 of the source to every target rank, in a process group; NCCL on GPUs.

    The group is created at the first transfer, and again without an engine that has failed. An engine that raises during
    a transfer receives the rest for the others; one whose process dies or hangs ends it for all, as they wait for it.
    """

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
        self._members: Sequence[int] = ()

    def _send(self, version: int, mix: float) -> None:
        if self._target.members.max_failures:
            _wait(self._target, _submit(self._target, "end_weights"))  # does nothing on an engine that responds
        if list(self._members) != list(self._target.ranks):
            self._meet()
        options = weights.BUCKET_BYTES, self._sampled(version)
        sending = _submit(self._source, "send_weights", self._route, self._source.role, *options)
        taking = _submit(self._target, "take_weights", self._route, self._target.role, version, mix)
        runtime = self._target.runtime
        try:
            runtime.wait([*sending.values(), *taking.values()], "weight sync", runtime.config.call_timeout_s)
        except (HostDied, DeadlineExceeded) as error:
            if self._target.members.max_failures:
                error.add_note(_BROKEN)
            raise
        except InfrastructureError:  # of an engine that did not load them, or of the source
            _wait(self._source, sending)
            _wait(self._target, taking)

    def _meet(self) -> None:
        runtime, pool = self._source.runtime, self._source.pool
        timeout_s = runtime.config.call_timeout_s
        address = runtime.address(pool)
        port = runtime.wait([runtime.submit(pool, 0, "open_broadcast", address)], "weight sync", timeout_s)[0].value
        places = [(pool, 0), *((self._target.pool, rank) for rank in self._target.ranks)]
        handles = [
            runtime.submit(pool, number, "join_broadcast", self._route, address, port, rank, len(places), timeout_s)
            for rank, (pool, number) in enumerate(places)
        ]
        runtime.wait(handles, "weight sync", timeout_s)
        self._members = self._target.ranks


def _submit(group: Group, action: str, *args: Any) -> dict[int, Any]:
    """Start an action on every host of a group, and return rank -> handle."""
    return {rank: group.runtime.submit(group.pool, rank, action, *args) for rank in group.ranks}


def _wait(group: Group, handles: Mapping[int, Any]) -> dict[int, Any]:
    """Return rank -> result of the action, without engines that failed."""
    return {rank: reply.value for rank, reply in group.members.wait(handles, "weight sync").items()}
