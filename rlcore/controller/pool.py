"""Settings of pools and of the runtime, and the check that a cluster can hold the pools.

The settings are here because this module does not import torch, so neither does composing a config.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlcore.errors import CapacityError, require, require_at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """`nodes × devices_per_node` devices of one kind. Example: PoolConfig(nodes=2, devices_per_node=8, device="cuda")"""

    nodes: int = 1
    """Machines of the pool."""
    devices_per_node: int = 1
    """Devices, each with a host process, on each of them."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto is cuda if this machine, or a node of the cluster at runtime.address, has a GPU."""
    cpus_per_device: int = 1
    """CPU cores and threads of each host process."""
    python: str = ""
    """Interpreter of this pool's processes, by default the controller's. Python and Ray versions must be equal."""

    def __post_init__(self) -> None:
        require_at_least(self, nodes=1, devices_per_node=1, cpus_per_device=1)

    @property
    def num_devices(self) -> int:
        return self.nodes * self.devices_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """Settings for starting processes and waiting for them."""

    name: Literal["ray", "local"] = "ray"
    """local runs everything in this process, for a debugger."""
    address: str = ""
    """Address of a running Ray cluster; empty starts one on this machine."""
    start_timeout_s: float = 1800.0
    """Limit for starting Ray and hosts, and for creating a role's workers: engines compile, large models load."""
    call_timeout_s: float = 1800.0
    """Limit for each call of a group."""

    def __post_init__(self) -> None:
        require(self.start_timeout_s > 0, "start_timeout_s", "more than 0", self.start_timeout_s, 1800.0)
        require(self.call_timeout_s > 0, "call_timeout_s", "more than 0", self.call_timeout_s, 1800.0)


def available_cores() -> int:
    """Return the number of cores that this process may use, within its affinity and cgroup limits."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    limit = Path("/sys/fs/cgroup/cpu.max")
    if limit.exists():
        quota, period = limit.read_text().split()[:2]
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def check_capacity(pools: Mapping[str, PoolConfig], nodes: Sequence[Mapping[str, float]]) -> None:
    """Refuse pools that the cluster can never hold.

    Args:
        nodes: free resources of each node: {"CPU": 8, "GPU": 1}.

    Raises:
        CapacityError: a pool does not fit; the text shows the arithmetic.
    """
    left = [dict(node) for node in nodes]
    for name, pool in pools.items():
        need = {"CPU": pool.devices_per_node * pool.cpus_per_device}
        if pool.device == "cuda":
            need["GPU"] = pool.devices_per_node
        fitting = [node for node in left if all(node.get(kind, 0) >= amount for kind, amount in need.items())]
        if len(fitting) < pool.nodes:
            raise CapacityError(_arithmetic(name, pool, need, pools, nodes))
        for node in fitting[: pool.nodes]:
            for kind, amount in need.items():
                node[kind] -= amount


def _arithmetic(
    name: str,
    pool: PoolConfig,
    need: Mapping[str, float],
    pools: Mapping[str, PoolConfig],
    nodes: Sequence[Mapping[str, float]],
) -> str:
    asked = " and ".join(f"{amount:g} {kind}" for kind, amount in need.items())
    has = "; ".join(
        " and ".join(f"{node.get(kind, 0):g} {kind}" for kind in need) + (f" on node {i}" if len(nodes) > 1 else "")
        for i, node in enumerate(nodes)
    )
    others = [other for other in pools if other != name]
    before = f" (other pools also need some: {', '.join(others)})" if others else ""
    return (
        f"pool '{name}' does not fit: {pool.devices_per_node} devices × {pool.cpus_per_device} cores = {asked} on each of"
        f" {pool.nodes} nodes; the cluster has {has}{before}.\n"
        f"Request less:  pools.{name}.devices_per_node=1  pools.{name}.cpus_per_device=1   or share one pool:"
        f"  placement=colocated"
    )
