"""Tests that need a CUDA device: the backend contract, the variable-length kernel, pinned host memory, offload."""

import pytest
import torch
from fsdp_cases import PRELOAD, fsdp_weights, local_weights, make_fsdp, make_local
from rlcore_fsdp import FSDPBackend, FSDPConfig
from rlcore_fsdp.attention import Layout, attention

from rlcore.models.attention import packed_attention
from rlcore.testing import BackendContract, run_ranks
from rlcore.testing.training import LENGTHS, check_equal, follow, make_batch, save_model, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
ON_GPU = {"device": "cuda:0"}
STEPS = 10


class TestOnGPU(BackendContract):
    device = "cuda:0"

    def make(self, model, optimizer, context):
        return FSDPBackend(FSDPConfig(), model=model, optimizer=optimizer, context=context)


class TestOnGPUWithHostMemory(TestOnGPU):
    def make(self, model, optimizer, context):
        return FSDPBackend(FSDPConfig(cpu_offload=True), model=model, optimizer=optimizer, context=context)


@pytest.fixture
def path(tmp_path):
    return save_model("qwen3", tmp_path / "model", hidden_size=64, head_dim=64)


@pytest.mark.parametrize("window", [None, 3], ids=["whole", "window"])
def test_the_flash_kernel_gives_the_same_outputs_as_the_buckets(window):
    generator = torch.Generator("cuda").manual_seed(0)
    draw = lambda heads: torch.randn(  # noqa: E731
        1, heads, sum(LENGTHS), 64, device="cuda", dtype=torch.bfloat16, generator=generator
    )
    query, key, value = draw(4), draw(2), draw(2)
    layout = Layout(LENGTHS, "cuda:0")

    found, _ = attention(None, query, key, value, None, packing=layout, sliding_window=window)

    expected, _ = packed_attention(
        None, query.float(), key.float(), value.float(), None, packing=layout.packing, sliding_window=window
    )
    torch.testing.assert_close(found.float(), expected, atol=2e-2, rtol=2e-2)


def test_training_in_bfloat16_is_close_to_float32(path):
    batch = make_batch().to("cuda:0")
    exact, rough = (make_fsdp(path, context=ON_GPU, precision=kind) for kind in ("float32", "bfloat16"))

    found, expected = train(rough, batch, 3), train(exact, batch, 3)

    assert [row[0] for row in found] == pytest.approx([row[0] for row in expected], rel=0.1, abs=0.1)


def test_offload_frees_the_device_memory(path):
    backend, batch = make_fsdp(path, context=ON_GPU), make_batch().to("cuda:0")
    train(backend, batch, 1)
    parameters = sum(p.numel() * p.element_size() for p in backend._names)
    before = torch.cuda.memory_allocated()

    backend.offload()

    # parameters and both moments of AdamW
    assert before - torch.cuda.memory_allocated() >= 3 * parameters
    backend.reload()
    train(backend, batch, 1)


def steps_of_a_rank(rank, world, directory, path, config):
    device = f"cuda:{rank}"
    torch.cuda.set_device(device)
    context = {"rank": rank, "world_size": world, "device": device, "total_steps": STEPS, "seed": 4}
    backend = make_fsdp(path, config=config, context=context, max_tokens_per_device=14)
    return follow(backend, make_batch().to(device), STEPS, directory / "weights.safetensors", weights=fsdp_weights)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
@pytest.mark.parametrize(
    "config", [{}, {"replicate": 2}, {"tensor_parallel": 2}, {"context_parallel": 2}, {"lora_rank": 2}], ids=str
)
def test_two_devices_over_nccl_give_the_results_of_local_on_one(config, path, tmp_path):
    reports = run_ranks(2, steps_of_a_rank, tmp_path / "ranks", path, config, preload=PRELOAD, timeout_s=300)

    settings = {name: value for name, value in config.items() if name.startswith("lora")}
    local = make_local(path, config=settings, context=ON_GPU | {"total_steps": STEPS, "seed": 4})
    file = tmp_path / "local.safetensors"
    whole = follow(local, make_batch().to("cuda:0"), STEPS, file, weights=local_weights)
    check_equal(reports, whole, make_batch())
