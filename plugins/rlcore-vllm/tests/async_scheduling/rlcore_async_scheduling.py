"""vLLM plugin for tests: async scheduling on the CPU platform, which vLLM enables on GPUs only.

vLLM then launches a batch before it processes the tokens of the previous one. conftest.py puts this folder on the path,
so vLLM loads it in every process; `RLCORE_TEST_ASYNC_SCHEDULING=1` enables it for engines created from then on.
"""

import contextlib
import os

import torch

VARIABLE = "RLCORE_TEST_ASYNC_SCHEDULING"


class Stream:
    """Stand-in for streams and events, which have nothing to wait for on a CPU."""

    def __init__(self, *args, **options):
        pass

    def wait(self, *args):
        pass

    record = synchronize = wait_stream = wait_event = wait


def register():
    """Wrap the method of the CPU platform that turns async scheduling off."""
    from vllm.platforms.cpu import CpuPlatform

    own = CpuPlatform.check_and_update_config

    def check_and_update_config(cls, vllm_config):
        own(vllm_config)
        if stub_streams():
            vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    stub_streams()  # needed in the engine process of a server, which receives a finished config


def stub_streams():
    """Replace CUDA streams and events for the rest of the process; return False if async scheduling is not enabled."""
    if os.environ.get(VARIABLE) != "1":
        return False
    torch.Event = torch.cuda.Event = torch.Stream = torch.cuda.Stream = Stream
    torch.cuda.current_stream = torch.accelerator.current_stream = lambda *args: Stream()
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    return True
