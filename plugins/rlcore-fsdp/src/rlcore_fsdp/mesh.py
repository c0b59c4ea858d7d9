"""The grid of devices and its process groups.

Ranks are laid out as replicate · shard · context · tensor, the last varying fastest, so that the ranks of a tensor- or
context-parallel group are neighbors. FSDP shards over the shard and context axes together: ranks that split the tokens
of a sample hold different parameters, like ranks with different samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rlcore.kits.backend.grid import check_devices, need_process_group
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
    need_process_group(context)
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
    axes = ("replicate", "context_parallel", "tensor_parallel")
    check_devices(world, {name: getattr(config, name) for name in axes})
    return world // (config.context_parallel * config.tensor_parallel)


def _context_group(kind: str, world: int, size: int) -> dist.ProcessGroup | None:
    if size == 1:
        return None
    return init_device_mesh(kind, (world // size, size), mesh_dim_names=("outer", "context")).get_group("context")
