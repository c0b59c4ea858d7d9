"""Preparation of the host process for vLLM, and protection of the process state that vLLM changes."""

from __future__ import annotations

import os
import random
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from rlcore.errors import ConfigError
from rlcore.protocols.rollout import RolloutContext

_NEEDED = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in this process
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # worker.py replaces the sampler of the V1 model runner
}
_ALWAYS = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
_ON_CPU = {
    "TORCHDYNAMO_DISABLE": "1",  # compiling a helper of the sampler takes 10 to 40 s
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise every engine binds itself to the first core
}


def set_environment(device: str) -> None:
    """Set the environment variables that vLLM reads on import, unless they are already set.

    Raises:
        ConfigError: a variable has a value that this package cannot work with.
    """
    for name, value in _NEEDED.items():
        if os.environ.setdefault(name, value) != value:
            raise ConfigError(f"{name}={os.environ[name]}: rollout=vllm needs {value}\nType  unset {name}")
    for name, value in (_ALWAYS | (_ON_CPU if device == "cpu" else {})).items():
        os.environ.setdefault(name, value)
    if device == "cpu":
        import torch._dynamo

        torch._dynamo.config.disable = os.environ["TORCHDYNAMO_DISABLE"] == "1"


@contextmanager
def launched(context: RolloutContext) -> Iterator[None]:
    """Set the rank for vLLM's `external_launcher`, which uses the pool's existing process group.

    vLLM derives the name of a CPU engine's shared memory from the group's address. With an external launcher that address
    is the same for all runs on a machine, so the leftovers of a killed run would block the next one. A unique address per
    rank makes the ranks see different names, and vLLM falls back to the process group.
    """
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher as Launcher

    before = Launcher._distributed_args
    address = f"env://:{uuid.uuid4().hex}"
    Launcher._distributed_args = lambda self: (address, context.rank, 0)
    try:
        yield
    finally:
        Launcher._distributed_args = before


@contextmanager
def kept_as_it_was() -> Iterator[None]:
    """Restore random states, `torch.set_num_threads` and LD_PRELOAD, which vLLM changes when an engine starts.

    vLLM inspects all loaded modules when it starts. Some of them emit deprecation warnings when inspected; these are
    suppressed, because no user can act on them."""
    preload = os.environ.get("LD_PRELOAD")
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(), warnings.catch_warnings():
            for category in (DeprecationWarning, FutureWarning):
                warnings.simplefilter("ignore", category)
            yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        os.environ.pop("LD_PRELOAD", None)
        if preload is not None:
            os.environ["LD_PRELOAD"] = preload
