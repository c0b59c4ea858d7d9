"""`Members`: the ranks of a group that are in use, and the loss of one of several engines.

An engine that fails is left out only where the controller says so (schedule.max_engine_failures). What counts as its
failure is an InfrastructureError: the host ended, did not reply in time, or its engine raised one. Other engines may
still work after such an error. Any other error has a cause that they share, such as a setting, the data or a bug, so
it is raised.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rlcore.controller.future import Interrupt
from rlcore.controller.host import Reply
from rlcore.controller.ref import BatchRef
from rlcore.controller.runtime import Runtime
from rlcore.errors import DeadlineExceeded, HostDied, InfrastructureError
from rlcore.types import Mesh

logger = logging.getLogger(__name__)


class Members:
    """The ranks of a group that are in use, which all handles on the group share."""

    def __init__(self, runtime: Runtime, role: str, pool: str, meshes: Sequence[Mesh]) -> None:
        self._runtime, self._role, self._pool = runtime, role, pool
        self.meshes = meshes
        """Of the ranks in use; `dp_rank` counts only these."""
        self.ranks: Sequence[int] = range(len(meshes))
        """Ranks of the pool that are in use, ascending."""
        self.max_failures = 0
        """Engines that may fail; 0: a failure is raised."""
        self._num_failures = 0
        self._keeper = ""

    def tolerate(self, max_failures: int, keeper: str) -> None:
        """Leave out engines that fail, up to this number; each is one rank that has its host to itself.

        Args:
            keeper: pool of the hosts that copy the batches which engines return, as Ray's store loses what a process
                has put there when it ends. Nothing is copied in one process.
        """
        assert all(mesh.dp_size == len(self.meshes) for mesh in self.meshes), "an engine with several ranks"
        self.max_failures, self._keeper = max_failures, "" if self._runtime.inline else keeper

    def wait(self, handles: Mapping[int, object], what: str, interrupt: Interrupt = None) -> dict[int, Reply]:
        """Return rank -> reply; an engine that fails is left out and has none.

        Raises:
            Exception: the failure of the first rank that failed, unless it is an engine that is left out.
        """
        if not self.max_failures:
            timeout_s = self._runtime.config.call_timeout_s
            waited = self._runtime.wait(list(handles.values()), what, timeout_s, interrupt=interrupt) if handles else ()
            return dict(zip(handles, waited))
        replies = self._wait_each(handles, what, interrupt)
        copies = {rank: self._copy(rank, reply) for rank, reply in replies.items() if self._is_lost_with(reply)}
        copied = self._copied(copies, f"copy of {what}")
        return {
            rank: replace(reply, value=copied[rank].value) if rank in copied else reply
            for rank, reply in replies.items()
            if rank in copied or rank not in copies
        }

    def leave_out(self, rank: int, error: InfrastructureError) -> None:
        """End the host of an engine that failed, and use the group without it from now on.

        Raises:
            InfrastructureError: the error; the engine is the last one, or more have failed than may.
        """
        if rank not in self.ranks:
            return
        if len(self.ranks) == 1 or self._num_failures >= self.max_failures:
            if self._num_failures:
                failed = f"{self._num_failures} other engines of pool '{self._pool}' failed before"
                error.add_note(f"{failed}; schedule.max_engine_failures={self.max_failures}")
            raise error
        self._num_failures += 1
        meshes = [mesh for mesh, it in zip(self.meshes, self.ranks) if it != rank]
        self.meshes = [replace(mesh, dp_rank=place, dp_size=len(meshes)) for place, mesh in enumerate(meshes)]
        self.ranks = [it for it in self.ranks if it != rank]
        logger.warning(
            "engine %d of pool '%s' failed and is left out, %d remain: %s",
            *(rank, self._pool, len(meshes), str(error).partition("\n")[0]),
        )
        logger.info("failure of engine %d of pool '%s': %s", rank, self._pool, error)
        try:
            self._runtime.end_host(self._pool, rank)
        except Exception as second:  # of an engine in this process, which is not used again
            logger.warning("closing engine %d of pool '%s' failed: %s", rank, self._pool, second)

    def _wait_each(self, handles: Mapping[int, object], what: str, interrupt: Interrupt = None) -> dict[int, Reply]:
        """Wait for all ranks at once, and return the replies of those that have not failed."""
        timeout_s = self._runtime.config.call_timeout_s
        waited = self._runtime.wait_each(list(handles.values()), what, timeout_s, interrupt) if handles else ()
        replies: dict[int, Reply] = {}
        for rank, outcome in zip(handles, waited):
            if isinstance(outcome, InfrastructureError):
                self.leave_out(rank, outcome)
            else:
                replies[rank] = outcome
        return replies

    def _copied(self, copies: Mapping[int, object], what: str) -> dict[int, Reply]:
        """Wait for copies; an engine whose batches are lost is left out.

        Raises:
            HostDied, DeadlineExceeded: the trainer's host, which copies, failed.
        """
        waited = (
            self._runtime.wait_each(list(copies.values()), what, self._runtime.config.call_timeout_s) if copies else ()
        )
        for rank, outcome in zip(copies, waited):
            if isinstance(outcome, HostDied | DeadlineExceeded):
                raise outcome
            if isinstance(outcome, InfrastructureError):
                self.leave_out(rank, outcome)
        return {rank: it for rank, it in zip(copies, waited) if isinstance(it, Reply)}

    def _is_lost_with(self, reply: Reply) -> bool:
        """Return whether a reply has batches that would be lost with the engine. The last engine's loss ends the run."""
        values = reply.value if isinstance(reply.value, tuple) else (reply.value,)
        return bool(self._keeper) and len(self.ranks) > 1 and any(isinstance(value, BatchRef) for value in values)

    def _copy(self, rank: int, reply: Reply) -> object:
        """Start to copy the batches of a reply to a host of the trainer."""
        place = rank % self._runtime.pool_size(self._keeper)
        return self._runtime.submit(self._keeper, place, "keep", reply.value)
