"""The backend on the CPU, its oracle, and small models with the features of their families."""

import gc
import warnings

import torch.distributed as dist
from cpu_double import CPUMegatron
from rlcore_megatron import MegatronConfig

from rlcore.backends.local import LocalBackend, LocalConfig
from rlcore.protocols.backend import BackendContext, ModelConfig
from rlcore.testing import training
from rlcore.testing.training import GENTLE

PRELOAD = (
    "transformers.models.qwen3.modeling_qwen3",
    "rlcore_megatron.engine",
    "cpu_double",
    "rlcore.testing.training",
)
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_OWN = {
    "llama": {"tie_word_embeddings": False, "rope_parameters": _LLAMA3},
    "qwen2": {"tie_word_embeddings": True},
}


def save_model(family, directory, **changes):
    """Save a random model of four layers and return its path."""
    return training.save_model(family, directory, **{"num_hidden_layers": 4, **_OWN.get(family, {}), **changes})


def make_megatron(path, *, config=None, optimizer=GENTLE, context=None, **model):
    """Create the backend on the CPU; the arguments are fields of MegatronConfig, BackendContext and ModelConfig."""
    _leave_grid()  # each test has its own grid
    return another_megatron(path, config=config, optimizer=optimizer, context=context, **model)


def _leave_grid():
    """Destroy the process groups, which megatron-core drops without stopping their three polling threads each."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    gc.collect()  # delete models that refer to them
    if dist.is_initialized():
        dist.barrier()  # another rank may still be reading
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def another_megatron(path, *, config=None, optimizer=GENTLE, context=None, **model):
    """Create a backend on the present grid."""
    return CPUMegatron(
        MegatronConfig(**(config or {})),
        model=ModelConfig(path=path, **model),
        optimizer=optimizer,
        context=BackendContext(**(context or {})),
    )


def make_local(path, *, optimizer=GENTLE, context=None, **model):
    """Create the oracle for the same arguments."""
    about = BackendContext(**(context or {}))
    return LocalBackend(LocalConfig(), model=ModelConfig(path=path, **model), optimizer=optimizer, context=about)
