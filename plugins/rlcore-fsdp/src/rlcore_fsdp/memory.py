"""Memory of a step in addition to shards and activations, and error messages when a device runs out of memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rlcore.errors import InfrastructureError
from rlcore.models.size import ModelSize
from rlcore_fsdp.config import FSDPConfig

_GIB = 2**30


def working_bytes(config: FSDPConfig, size: ModelSize, *, precision: str, world_size: int, trained: bool) -> int:
    """Return the bytes of gathered parameters and of gradients that are not sharded yet.

    A step peaks in the backward pass of the output embedding or of a layer. Checked against torch's memory tracker.
    """
    width = 2 if precision == "bfloat16" else 4
    head, layer = size.head_size, size.layer_size // config.tensor_parallel
    whole = size.num_parameters // config.tensor_parallel
    tied = head if size.tied else 0
    resharded = config.reshard_after_forward
    if not trained or config.lora_rank:
        # a layer, the next one, and the buffer of its all-gather
        return width * (max(head + 2 * layer, 3 * layer + tied) if resharded else whole + head + 2 * layer)
    # The head's gradient: a float32 sum and the product of one chunk; if tied, it is added to that of the embedding.
    in_head = (3 * width + 4 if size.tied else 12 - width) * head
    shards = 1 if config.reduce_gradients == "every" else max(1, world_size // config.replicate)
    in_layer = 4 * layer // shards + width * tied
    if resharded:
        gathered = max(in_head + width * (head + layer), in_layer + width * (3 * layer + tied))
    else:
        gathered = width * whole + max(in_head, in_layer)
    reduced = 4 * (head + layer) * config.replicate // world_size if config.replicate > 1 else 0
    return gathered + reduced + _unreduced(config, whole, size.num_parameters, world_size)


def _unreduced(config: FSDPConfig, whole: int, num_parameters: int, world_size: int) -> int:
    """Return the bytes of the full gradient on a device, minus the shard that `model_bytes` counts."""
    if config.reduce_gradients == "every":
        return 0
    shard = 0 if config.cpu_offload else num_parameters * config.replicate // world_size
    return 4 * (whole - shard)


class OutOfMemory(InfrastructureError, MemoryError):
    """A device ran out of memory; the message names the phase and the setting that reduces its memory."""


@contextmanager
def explained(
    phase: str, num_tokens: int | None, max_tokens: int, device: torch.device, *, holds_whole_gradient: bool = False
) -> Iterator[None]:
    """Convert the allocator's error into one that names the setting to change.

    Args:
        phase: "forward", "forward and backward" or "optimizer step".
        num_tokens: tokens of the current micro-batch; None outside a micro-batch.
        holds_whole_gradient: the device holds the full gradient, so smaller micro-batches would not help.
    """
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        yield
    except torch.OutOfMemoryError as error:
        advice = _advice(phase, num_tokens, max_tokens, device, before, str(error))
        if holds_whole_gradient:
            first, _, _ = advice.partition("\n")
            advice = f"{first}\nType  backend.reduce_gradients=every  to hold only a shard of the gradients."
        raise OutOfMemory(advice) from error


def _advice(phase: str, num_tokens: int | None, max_tokens: int, device: torch.device, before: int, reason: str) -> str:
    first = f"{device} ran out of memory in {phase}"
    why = reason.splitlines()[0] if reason else "no reason given"
    if num_tokens is None:
        return (
            f"{first}: {why}\n"
            "Type  backend.cpu_offload=true  to keep parameters and optimizer in host memory, or add devices to the pool."
        )
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    used = f" ({(peak - before) / _GIB:.1f} GiB above the {before / _GIB:.1f} GiB before it)" if peak else ""
    half = max(1, min(num_tokens, max_tokens) // 2)
    return (
        f"{first} of a micro-batch of {num_tokens} tokens{used}: {why}\n"
        f"Type  model.max_tokens_per_device={half}  to halve the memory of a micro-batch (a longer sample is not split:"
        " use  backend.context_parallel=2), or  model.gradient_checkpointing=true  to recompute the activations of layers."
    )
