"""The backend on the CPU and its oracle for tests, and models with what is particular to their families."""

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
    """A random model of four layers on disk; returns its path."""
    return training.save_model(family, directory, **{"num_hidden_layers": 4, **_OWN.get(family, {}), **changes})


def make_megatron(path, *, config=None, optimizer=GENTLE, context=None, **model):
    """The backend on the CPU; `config` and `context` are fields, `model` are fields of ModelConfig."""
    _leave_grid()  # each test has one of its own
    return another_megatron(path, config=config, optimizer=optimizer, context=context, **model)


def _leave_grid():
    """megatron-core forgets its groups without ending them, and each has three threads that look about all the time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    gc.collect()  # models that know them
    if dist.is_initialized():
        dist.barrier()  # a peer may still be reading
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def another_megatron(path, *, config=None, optimizer=GENTLE, context=None, **model):
    """The same, on the grid that is there."""
    return CPUMegatron(
        MegatronConfig(**(config or {})),
        model=ModelConfig(path=path, **model),
        optimizer=optimizer,
        context=BackendContext(**(context or {})),
    )


def make_local(path, *, optimizer=GENTLE, context=None, **model):
    """The oracle for the same."""
    about = BackendContext(**(context or {}))
    return LocalBackend(LocalConfig(), model=ModelConfig(path=path, **model), optimizer=optimizer, context=about)
