"""`Runtime`: starts hosts and sends calls to them. `local` is here, `ray` in ray_runtime.py, their choice in make.py.

Both have the same interface and give bitwise equal results on one device. Every wait has a deadline.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from rlcore.controller.future import Interrupt
from rlcore.controller.host import Host, HostInfo, Reply
from rlcore.controller.interpreter import check_interpreter
from rlcore.controller.pool import PoolConfig, RuntimeConfig, available_cores, check_capacity
from rlcore.controller.ref import Store
from rlcore.errors import CapacityError, ConfigError, InfrastructureError
from rlcore.protocols.dispatch import Call

logger = logging.getLogger(__name__)


class Runtime(Protocol):
    """Interface of the runtimes."""

    store: Store
    config: RuntimeConfig
    inline: bool
    """True if `submit` runs the action before it returns."""

    def start(self, pools: Mapping[str, PoolConfig], env: Mapping[str, Sequence[Mapping[str, str]]]) -> None:
        """Start the hosts of all pools; `env[pool][rank]` is set before a host imports anything."""

    def pool_size(self, pool: str) -> int:
        """Return the number of hosts of a pool."""

    def device(self, pool: str) -> Literal["cpu", "cuda"]:
        """Return the kind of device of a pool; known once it is started."""

    def address(self, pool: str) -> str:
        """Return the address at which other hosts reach rank 0 of a pool."""

    def submit(self, pool: str, rank: int, action: str, *args: Any) -> Any:
        """Start `Host.action(*args)` on one host; returns a handle for `wait`."""

    def wait(
        self,
        handles: Sequence[Any],
        what: str,
        timeout_s: float,
        setting: str = "call_timeout_s",
        interrupt: Interrupt = None,
    ) -> list[Reply]:
        """Return the replies in order.

        Args:
            setting: field of RuntimeConfig that sets the deadline, for the error.
            interrupt: called about once per second while waiting; it may raise, and the handles stay valid.

        Raises:
            DeadlineExceeded: ranks of `what` are late; the text shows their stacks.
            HostDied: a host process ended.
            Exception: the failure of the first rank that failed, at once.
        """

    def wait_each(
        self, handles: Sequence[Any], what: str, timeout_s: float, interrupt: Interrupt = None
    ) -> list[Reply | InfrastructureError]:
        """Return, in order, the reply of each call or its InfrastructureError, which does not end the wait for others.

        Raises:
            Exception: any other failure, at once.
        """

    def done(self, handles: Sequence[Any]) -> bool:
        """Return whether `wait` would not wait."""

    def end_host(self, pool: str, rank: int) -> None:
        """End one host for good, also if it does not respond. Its rank may not be called any more."""

    def shutdown(self) -> None:
        """Shut down everything that `start` started. May be called twice."""


class LocalStore:
    """Store of this process, where a reference is the value itself."""

    def put(self, values: Sequence[Tensor | list[Any]]) -> list[Any]:
        return list(values)

    def get(self, refs: Sequence[Any]) -> list[Any]:
        return list(refs)


class LocalRuntime:
    """Runs every host in this process, for debugging and without Ray; a call runs when it is submitted."""

    inline = True

    def __init__(self, config: RuntimeConfig) -> None:
        self.config = config
        self.store: Store = LocalStore()
        self._hosts: dict[str, list[Host]] = {}

    def start(self, pools: Mapping[str, PoolConfig], env: Mapping[str, Sequence[Mapping[str, str]]]) -> None:
        check_machine(self.config, pools)
        if any(variables for ranks in env.values() for variables in ranks):
            logger.warning("runtime=local: the variables of rlcore_worker_env are ignored, as this process is running")
        for name, pool in pools.items():
            device = resolve_device(pool.device)
            self._hosts[name] = [
                Host(
                    HostInfo(
                        pool=name,
                        rank=rank,
                        world_size=pool.num_devices,
                        device="cuda:0" if device == "cuda" else "cpu",
                        threads=pool.cpus_per_device,
                    ),
                    self.store,
                )
                for rank in range(pool.num_devices)
            ]

    def pool_size(self, pool: str) -> int:
        return len(self._hosts[pool])

    def device(self, pool: str) -> Literal["cpu", "cuda"]:
        return "cpu" if self._hosts[pool][0].info.device == "cpu" else "cuda"

    def address(self, pool: str) -> str:
        return "127.0.0.1"

    def submit(self, pool: str, rank: int, action: str, *args: Any) -> Any:
        return getattr(self._hosts[pool][rank], action)(*args)

    def wait(
        self,
        handles: Sequence[Any],
        what: str,
        timeout_s: float,
        setting: str = "call_timeout_s",
        interrupt: Interrupt = None,
    ) -> list[Reply]:
        for reply in handles:
            if isinstance(reply, Reply):
                reply.check()
        return list(handles)

    def wait_each(
        self, handles: Sequence[Any], what: str, timeout_s: float, interrupt: Interrupt = None
    ) -> list[Reply | InfrastructureError]:
        outcomes: list[Reply | InfrastructureError] = []
        for reply in handles:
            try:
                outcomes += self.wait([reply], what, timeout_s)
            except InfrastructureError as error:
                outcomes.append(error)
        return outcomes

    def done(self, handles: Sequence[Any]) -> bool:
        return True

    def end_host(self, pool: str, rank: int) -> None:
        self._hosts[pool][rank].close()

    def shutdown(self) -> None:
        for hosts in self._hosts.values():
            for host in hosts:
                host.close()
        self._hosts.clear()


def check_machine(config: RuntimeConfig, pools: Mapping[str, PoolConfig]) -> None:
    """Refuse pools that this machine cannot hold. A cluster is checked when the run joins it.

    Raises:
        UserError: devices, cores or an interpreter are missing.
    """
    if config.address:
        return
    for name, pool in pools.items():
        if config.name == "local" and pool.device == "cuda" and not torch.cuda.is_available():
            raise CapacityError(
                f"pools.{name}.device=cuda, but PyTorch {torch.__version__} sees no GPU\nType  pools.{name}.device=auto"
            )
        if pool.python:
            check_interpreter(name, pool.python)
        if pool.python and config.name == "local":
            raise ConfigError(
                f"pools.{name}.python={pool.python}: runtime=local runs everything in one process\nType  runtime=ray"
            )
    if config.name == "ray":
        wanted = {name: replace(pool, device=resolve_device(pool.device)) for name, pool in pools.items()}
        check_capacity(wanted, [{"CPU": available_cores(), "GPU": torch.cuda.device_count()}])


def resolve_device(device: Literal["auto", "cpu", "cuda"]) -> Literal["cpu", "cuda"]:
    """Return the device of a setting on this machine: auto is cuda if PyTorch sees a GPU."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def cluster_decides(config: RuntimeConfig, pool: PoolConfig) -> bool:
    """Return whether the pool's device=auto is decided only when the run joins a cluster."""
    return config.name == "ray" and config.address != "" and pool.device == "auto"


__all__ = [
    "Call",
    "LocalRuntime",
    "Runtime",
    "RuntimeConfig",
    "cluster_decides",
    "resolve_device",
]
