"""The grid of devices and its process groups.

Ranks are laid out as replicate · shard · context · tensor, the last varying fastest, so that the ranks of a tensor- or
context-parallel group are neighbours. FSDP shards over the shard and context axes together: ranks that split the tokens
of a sample hold different parameters, like ranks with different samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rlcore.errors import ConfigError
from rlcore.protocols.backend import BackendContext
from rlcore.types import Mesh
from rlcore_fsdp.config import FSDPConfig


@dataclass(frozen=True, slots=True)
class Grid:
    """Position of this rank, and its process groups."""

    here: Mesh
    fsdp: DeviceMesh
    """Mesh for `fully_shard`: 1-D (shard) or 2-D (replicate, shard)."""
    shard_group: dist.ProcessGroup
    tensor: DeviceMesh | None
    """1-D mesh; None with tensor_parallel=1."""
    context: dist.ProcessGroup | None
    """None with context_parallel=1."""
    averaged_over: int
    """Divisor that FSDP applies to gradients; losses are multiplied by it, so that gradients are summed."""


def make_grid(config: FSDPConfig, context: BackendContext) -> Grid:
    """Create the grid of a pool. Collective.

    Raises:
        ConfigError: the number of devices does not match the sizes of the axes.
    """
    world = context.world_size
    dp_size = data_parallel_size(config, world)
    inner = world // dp_size
    kind = context.device.partition(":")[0]
    if kind == "cuda":
        torch.cuda.set_device(context.device)  # otherwise the mesh guesses the device and warns
    _need_process_group(world, kind)
    sizes = {"replicate": config.replicate, "fsdp": world // config.replicate // config.tensor_parallel}
    if config.tensor_parallel > 1:
        sizes["tensor"] = config.tensor_parallel
    if config.replicate == 1:
        del sizes["replicate"]
    root = init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return Grid(
        here=Mesh(
            rank=context.rank,
            world_size=world,
            dp_rank=context.rank // inner,
            dp_size=dp_size,
            returns=context.rank % inner == 0,
        ),
        fsdp=root["replicate", "fsdp"] if config.replicate > 1 else root["fsdp"],
        shard_group=root.get_group("fsdp"),
        tensor=root["tensor"] if config.tensor_parallel > 1 else None,
        context=_context_group(kind, world, config.context_parallel),
        averaged_over=world // config.tensor_parallel,
    )


def data_parallel_size(config: FSDPConfig, world: int) -> int:
    """Return the number of data-parallel ranks, which get different rows.

    Raises:
        ConfigError: the number of devices does not match the sizes of the axes.
    """
    inner = config.context_parallel * config.tensor_parallel
    if world % (config.replicate * inner):
        raise _does_not_fit(config, world)
    return world // inner


def _context_group(kind: str, world: int, size: int) -> dist.ProcessGroup | None:
    if size == 1:
        return None
    return init_device_mesh(kind, (world // size, size), mesh_dim_names=("outer", "context")).get_group("context")


def _need_process_group(world_size: int, kind: str) -> None:
    """Check the process group that the host has initialised, or create one for a single rank."""
    if not dist.is_initialized():
        assert world_size == 1, f"torch.distributed is not initialised on one of {world_size} ranks"
        backend = "gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    assert dist.get_world_size() == world_size, f"a process group of {dist.get_world_size()} for {world_size} ranks"


def _does_not_fit(config: FSDPConfig, world: int) -> ConfigError:
    set_above_1 = {
        name: getattr(config, name)
        for name in ("replicate", "context_parallel", "tensor_parallel")
        if getattr(config, name) > 1
    }
    product = config.replicate * config.context_parallel * config.tensor_parallel
    what = " · ".join(f"{name} {size}" for name, size in set_above_1.items())
    fits = ", ".join(str(product * factor) for factor in range(1, 5))
    divisors = ", ".join(str(size) for size in range(1, world + 1) if world % size == 0)
    return ConfigError(
        f"{world} devices cannot be divided by {what} = {product}\n"
        f"Give the pool {fits}, … devices, or a product of {divisors}:  backend.{next(iter(set_above_1))}=1"
    )
