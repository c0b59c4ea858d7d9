"""What to say when a device has no memory left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rlcore.errors import InfrastructureError

_GIB = 2**30


class OutOfMemory(InfrastructureError, MemoryError):
    """The device's memory did not do; the message says what was computed and which setting lowers the need by how much."""


@contextmanager
def explained(phase: str, num_tokens: int | None, max_tokens: int, device: torch.device) -> Iterator[None]:
    """Turn the allocator's error into one that says what to do.

    Args:
        phase: "forward", "forward and backward", "optimiser step".
        num_tokens: of the micro-batch at hand, which begins here; None outside of one.
    """
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(_advice(phase, num_tokens, max_tokens, device, before, str(error))) from error


def _advice(phase: str, num_tokens: int | None, max_tokens: int, device: torch.device, before: int, reason: str) -> str:
    first = f"{device} ran out of memory in {phase}"
    why = reason.splitlines()[0] if reason else "no reason given"
    if num_tokens is None:
        return (
            f"{first}: {why}\n"
            "Type  backend.cpu_offload=true  to hold parameters and optimiser in host memory, or give the pool more devices."
        )
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    used = f" ({(peak - before) / _GIB:.1f} GiB above the {before / _GIB:.1f} GiB before it)" if peak else ""
    half = max(1, min(num_tokens, max_tokens) // 2)
    return (
        f"{first} of a micro-batch of {num_tokens} tokens{used}: {why}\n"
        f"Type  model.max_tokens_per_device={half}  for about half of what a micro-batch takes (a longer sample stays whole:"
        " then backend.context_parallel=2), or  model.gradient_checkpointing=true  to keep only the borders of layers."
    )
