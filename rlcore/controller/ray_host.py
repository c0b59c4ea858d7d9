"""`RayHost`: the Ray actor around a Host."""

from __future__ import annotations

import os
from typing import Any

import ray

from rlcore.controller.host import Host, HostInfo
from rlcore.controller.network import use_interface_of
from rlcore.controller.ray_store import RayStore


class RayHost:
    """The actor: a Host, and three more threads: two for calls that run beside others, such as polls and rewards, and one
    for control, which responds while the others are busy."""

    def __init__(self, info: HostInfo, alone: bool) -> None:
        use_interface_of(self.address(), alone=alone)
        if info.device != "cpu":  # Ray sets it unless RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is set
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(ray.get_runtime_context().get_accelerator_ids()["GPU"])
        self._host = Host(info, RayStore())

    def act(self, action: str, args: tuple[Any, ...] = ()) -> Any:  # one tuple: Ray serializes arguments separately
        return getattr(self._host, action)(*args)

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def stack(self) -> str:
        return self._host.stack()

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    def abort(self) -> None:
        self._host.abort()

    def address(self) -> str:
        return str(ray.util.get_node_ip_address())
