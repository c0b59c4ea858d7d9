"""Peak memory of a training step on one of many ranks, with fake tensors and no other ranks.

The real backend is built and runs forward, backward (through FSDP's hooks) and an optimizer step, while torch's memory
tracker counts every storage. Loading weights, comparing packed samples and the gradient norm need values and are left
out.
"""

import contextlib
from unittest import mock

import rlcore_fsdp.backend
import rlcore_fsdp.model
import torch
import torch.distributed as dist
from rlcore_fsdp import FSDPBackend, FSDPConfig
from rlcore_fsdp.attention import NAME, Layout
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

from rlcore.protocols.backend import BackendContext, ModelConfig, OptimizerConfig

NUM_TOKENS = 2
"""Tokens of a micro-batch; few, so that activations are negligible."""


def peak_bytes(path, world_size, *, trained=True, precision="bfloat16", **settings):
    """Return the largest number of bytes that rank 0 holds at once in a step of three micro-batches."""
    ids, layout = torch.zeros(NUM_TOKENS, dtype=torch.int64), Layout([NUM_TOKENS], "cpu")
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with fake_process_group(world_size), without_values(mode):
        backend = FSDPBackend(
            FSDPConfig(**settings),
            model=ModelConfig(path=str(path), precision=precision),
            optimizer=OptimizerConfig(),
            context=BackendContext(world_size=world_size, trained=trained),
        )
        packed = backend._packed.requires_grad_(True)  # the tracker adds hooks to parameters, also of frozen models
        backend._plan = lambda batch: [[0], [0], [0]]
        batch = mock.MagicMock(num_tokens=NUM_TOKENS)
        tracker = MemTracker()

        def outputs(batch, temperature):
            tracker.reset_mod_stats()  # the tracker supports one forward pass per module
            found = packed(lambda: packed.head(packed.hidden(ids, layout), ids, 1.0))
            return found, found.sum() * 0.0

        def step():
            if not trained:
                with torch.no_grad():
                    outputs(batch, 1.0)
                packed.settle()
            else:
                backend.forward_backward(batch, lambda found, _: (found.sum(), {}), temperature=1.0)
                backend._optimizer.step(1e-3)

        backend._outputs = outputs
        with mode:
            step()  # creates the optimizer state, and DTensor's own fake tensors, which the tracker would count
            tracker.track_external(packed, *(backend._optimizer._all if trained else ()))
            with tracker:
                step()
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    return peak["Total"]


@contextlib.contextmanager
def fake_process_group(world_size):
    """Provide a process group of `world_size` whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        with mock.patch.object(dist, "new_group", return_value=dist.group.WORLD):
            yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def without_values(mode):
    """Build models under `mode`, without the functions that read values."""
    build, model = rlcore_fsdp.model.build, rlcore_fsdp.model

    def fake_build(*args):
        with mode:
            return build(*args)

    def use_packed_attention(packed, precision, device):
        packed.model.set_attn_implementation(NAME)

    with (
        mock.patch.object(rlcore_fsdp.backend, "build", fake_build),
        mock.patch.object(model, "load_shards"),
        mock.patch.object(model, "check_same_files"),
        mock.patch.object(model, "check_finite"),
        mock.patch.object(model, "_check_packing", use_packed_attention),
        mock.patch.object(model, "check_directory", lambda path: path),
    ):
        yield


def main(rank, world, directory, path, case):
    """Return `peak_bytes`; called by `run_ranks`, because the test's own process may have a process group already."""
    dist.destroy_process_group()
    try:
        return peak_bytes(path, **case)
    finally:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
