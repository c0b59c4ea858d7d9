"""`RayStore`: columns in Ray's object store. Ray loses a column when the process that put it ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
import ray.exceptions
from torch import Tensor

from rlcore.data.wire import pack, unpack
from rlcore.errors import DeadlineExceeded, HostDied

GET_TIMEOUT_S = 600.0


class RayStore:
    """Ray's object store; readers map buffers without copying."""

    def __init__(self, timeout_s: float = GET_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s

    def put(self, values: Sequence[Tensor | list[Any]]) -> list[Any]:
        return [ray.put(pack(value) if isinstance(value, Tensor) else value) for value in values]

    def get(self, refs: Sequence[Any]) -> list[Any]:
        try:
            values = ray.get(list(refs), timeout=self._timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise DeadlineExceeded(f"{len(refs)} columns did not arrive within {self._timeout_s:g} s") from error
        except ray.exceptions.ObjectLostError as error:
            raise HostDied(f"a column was lost with the host that created it: {error}") from error
        return [unpack(value) if isinstance(value, tuple) else value for value in values]
