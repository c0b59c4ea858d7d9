"""The process that vLLM moves into: what it needs set, and what it changes that belongs to others."""

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
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # worker.py replaces the sampler of the first one
}
_ALWAYS = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
_ON_CPU = {
    "TORCHDYNAMO_DISABLE": "1",  # a helper of the sampler would be compiled for 10 to 40 s
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every engine binds itself to the first core
}


def set_environment(device: str) -> None:
    """What vLLM reads when it is imported. A value that is there already stays.

    Raises:
        ConfigError: with the one that is there the engine would not be what the rest of this package expects.
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
    """Tell vLLM's `external_launcher` its rank; the process group of the pool is there already.

    From the address of the group vLLM also makes the name of shared memory for the ranks of a CPU engine. That of an
    external launcher is the same for every run of a machine, and what a killed run leaves blocks the next. With a name
    for each rank the ranks find that they differ, and use the process group instead.
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
    """Random states, `torch.set_num_threads` and LD_PRELOAD, which vLLM changes when an engine starts.

    Its start looks at every module there is, and some of them warn when they are looked at; nobody can act on that."""
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
