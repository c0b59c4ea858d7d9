"""The grid of devices, in megatron-core's order: tensor varies fastest, then context, data and pipeline.

megatron-core keeps its process groups in globals, so all models of a process share one grid.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from rlcore.errors import ConfigError
from rlcore.kits.backend.grid import need_process_group
from rlcore.protocols.backend import BackendContext
from rlcore.types import Mesh
from rlcore_megatron.config import MegatronConfig
from rlcore_megatron.fit import check_sizes


@dataclass(frozen=True, slots=True)
class Grid:
    """Position of this rank, and its process groups."""

    here: Mesh
    tensor: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    context: dist.ProcessGroup
    """Ranks that split the tokens of the same samples."""
    data: dist.ProcessGroup
    """Ranks that hold the same parameters: data-parallel and context-parallel ones."""
    expert: dist.ProcessGroup
    """Ranks that the experts of a layer are distributed over."""
    expert_data: dist.ProcessGroup
    """Ranks that hold the same experts."""


def make_grid(config: MegatronConfig, context: BackendContext) -> Grid:
    """Create the grid of a pool. Collective.

    Raises:
        ConfigError: the number of devices does not fit, or another model of this process has another grid.
    """
    check_sizes(config, context.world_size)
    need_process_group(context)
    sizes = (config.tensor_parallel, config.pipeline_parallel, config.context_parallel, config.expert_parallel)
    virtual = config.virtual_stages if config.virtual_stages > 1 else None
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=config.tensor_parallel,
            pipeline_model_parallel_size=config.pipeline_parallel,
            virtual_pipeline_model_parallel_size=virtual,
            context_parallel_size=config.context_parallel,
            expert_model_parallel_size=config.expert_parallel,
            expert_tensor_parallel_size=1,
            create_gloo_process_groups=False,
        )
        # layers access its generators even without dropout
        tensor_parallel.model_parallel_cuda_manual_seed(context.seed)
    found = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
    )
    if found != sizes or parallel_state.get_virtual_pipeline_model_parallel_world_size() != virtual:
        raise ConfigError(
            "two models of one process need different grids: tensor, pipeline, context and expert sizes"
            f" {found} and {sizes}\n"
            "Set the same backend sizes for all roles of a pool, or type  placement=split"
        )
    tensor = parallel_state.get_tensor_model_parallel_group()
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    context_group = parallel_state.get_context_parallel_group()
    rows = parallel_state.get_data_parallel_group()
    return Grid(
        here=Mesh(
            rank=context.rank,
            world_size=context.world_size,
            dp_rank=rows.rank(),
            dp_size=rows.size(),
            returns=tensor.rank() == context_group.rank() == 0 and pipeline.rank() == pipeline.size() - 1,
        ),
        tensor=tensor,
        pipeline=pipeline,
        context=context_group,
        data=parallel_state.get_data_parallel_group(with_context_parallel=True),
        expert=parallel_state.get_expert_model_parallel_group(),
        expert_data=parallel_state.get_expert_data_parallel_group(),
    )
