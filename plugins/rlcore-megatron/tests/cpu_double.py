"""Test double that lets megatron-core run without CUDA, by redirecting its uses of "cuda" to the CPU.

Covers what megatron-core 0.16 uses. Inside `on_cpu()` (per thread), devices named "cuda" are the CPU, tensors report CUDA
type strings to its optimizers, its random states are the CPU's, and streams do nothing. `CPUMegatron` is the backend
inside it; runs select it with `backend=cpu_double.py:CPUMegatron`. No product code refers to it.
"""

import contextlib
import functools
import warnings

import torch
from rlcore_megatron import MegatronBackend
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


def _means_cuda(device):
    if device is None or isinstance(device, bool):
        return False
    return isinstance(device, int) or torch.device(device).type == "cuda"


class _CUDAIsCPU(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.record_stream:
            return None
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if _means_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if (
            func is torch.Tensor.to
            and len(args) > 1
            and isinstance(args[1], str | torch.device)
            and _means_cuda(args[1])
        ):
            args = (args[0], _CPU, *args[2:])
        return func(*args, **kwargs)


class _Stream:
    def __init__(self, *args, **kwargs): ...
    def wait_stream(self, *args): ...
    def wait_event(self, *args): ...
    def synchronize(self): ...
    def record_event(self, *args):
        return _Stream()  # an event; only `synchronize` is used


@contextlib.contextmanager
def on_cpu():
    """Redirect megatron-core's uses of CUDA to the CPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import megatron.core.tensor_parallel.random as random
        from megatron.core.transformer.moe import moe_utils, token_dispatcher

    nothing = lambda *args, **kwargs: None  # noqa: E731
    replaced = [
        (torch.cuda, "current_device", lambda: _CPU),
        (torch.cuda, "synchronize", nothing),
        (torch.cuda, "empty_cache", nothing),
        (torch.cuda, "get_rng_state", lambda *args, **kwargs: torch.get_rng_state()),
        (torch.cuda, "set_rng_state", lambda state, *args, **kwargs: torch.set_rng_state(state)),
        (torch.cuda, "manual_seed", torch.manual_seed),
        (torch.cuda, "Stream", _Stream),
        (torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
        (torch.cuda, "current_stream", lambda *args: _Stream()),
        (torch.cuda, "default_stream", lambda *args: _Stream()),
        (random, "_get_cuda_rng_state", lambda *args, **kwargs: torch.get_rng_state()),
        (random, "_set_cuda_rng_state", lambda state, *args, **kwargs: torch.set_rng_state(state)),
        # two bugs of megatron-core, without Transformer Engine and with CPU tensors
        (moe_utils, "te_general_gemm", None),
        (token_dispatcher, "maybe_move_tensor_to_cpu", _as_numbers),
    ]
    before = [(owner, name, getattr(owner, name, None)) for owner, name, _ in replaced]
    for owner, name, instead in replaced:
        setattr(owner, name, instead)
    try:
        with _CUDAIsCPU():
            yield
    finally:
        for owner, name, original in before:
            setattr(owner, name, original)


def _as_numbers(tensor, as_numpy=False, record_stream=False):
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _inside(method):
    @functools.wraps(method)
    def call(*args, **kwargs):
        with on_cpu():
            return method(*args, **kwargs)

    return call


class CPUMegatron(MegatronBackend):
    """The Megatron backend on the CPU."""

    for _name in ("__init__", "forward", "forward_backward", "step", "save", "save_async", "load", "offload", "reload"):
        vars()[_name] = _inside(getattr(MegatronBackend, _name))
    load_weights = _inside(MegatronBackend.load_weights)

    @classmethod
    def data_parallel(cls, config, *, model, world_size, device):
        return super().data_parallel(config, model=model, world_size=world_size, device="cuda")

    def weights(self):
        stream = super().weights()
        while True:
            with on_cpu():
                item = next(stream, None)
            if item is None:
                return
            yield item
