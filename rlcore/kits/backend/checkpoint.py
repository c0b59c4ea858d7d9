"""Checkpoints in which each rank writes its part: files of tensors in `shards`, and everything else in backend.json.

backend.json is written last and lists the files with their sizes. A checkpoint is incomplete if it, or a file that it
lists, is missing. Nothing is pickled.
"""

from __future__ import annotations

import json
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from rlcore.errors import ModelError

SHARDS = "shards"
_STATE = "backend.json"
_TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Contents of backend.json. A backend adds its own fields in a subclass."""

    num_steps: int
    model_path: str
    """Path of the model that the run started from; it has the weights that the checkpoint does not contain."""
    files: dict[str, int] = field(default_factory=dict)
    """Name -> size in bytes of every file in `shards`."""


S = TypeVar("S", bound=State)


class ShardSaving:
    """A checkpoint being written, with the tensors as they were when the save began."""

    def __init__(self, directory: Path, state: State, written: Future[Any] | None, group: dist.ProcessGroup) -> None:
        """Track the write of this rank's file, `written`; None if there is nothing to wait for."""
        self._directory, self._state, self._written, self._group = directory, state, written, group

    def finish(self) -> None:
        """Wait until every rank has written its file; rank 0 then completes the checkpoint. Collective."""
        if self._written is not None:
            self._written.result(timeout=_TIMEOUT_S)
        dist.barrier(group=self._group)
        if dist.get_rank() == 0:
            files = {path.name: path.stat().st_size for path in sorted((self._directory / SHARDS).iterdir())}
            temporary = self._directory / f".{_STATE}"
            temporary.write_text(json.dumps(asdict(self._state) | {"files": files}, indent=1))
            temporary.rename(self._directory / _STATE)
        dist.barrier(group=self._group)


def read_state(directory: Path, kind: type[S], backend: str) -> S:
    """Read backend.json as a `kind` of state, and check that all files are there.

    Raises:
        ModelError: the checkpoint is incomplete or was written by another backend.
    """
    path = directory / _STATE
    if not path.is_file():
        raise ModelError(f"{directory} is an incomplete checkpoint: {_STATE} is missing\nNothing was loaded.")
    try:
        state = kind(**json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise ModelError(
            f"{path} is not from backend={backend}: {error}\nResume with the backend that wrote it."
        ) from error
    for name, size in state.files.items():
        file = directory / SHARDS / name
        found = file.stat().st_size if file.is_file() else 0
        if found != size:
            what = f"has {found} bytes instead of {size}" if found else "is missing"
            raise ModelError(f"{directory} is an incomplete checkpoint: {SHARDS}/{name} {what}\nNothing was loaded.")
    return state
