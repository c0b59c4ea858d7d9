"""Tests that need CUDA devices: the backend contract, and Transformer Engine's packed attention against rlcore's buckets."""

import importlib.util

import pytest
import torch
from megatron_cases import PRELOAD, make_local, save_model
from rlcore_megatron import MegatronBackend, MegatronConfig

from rlcore.protocols.backend import BackendContext, ModelConfig
from rlcore.testing import BackendContract, run_ranks
from rlcore.testing.training import GENTLE, check_equal, column, follow, make_batch, train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
STEPS = 6
HAS_ENGINE = importlib.util.find_spec("transformer_engine") is not None


class TestOnGPU(BackendContract):
    device = "cuda:0"

    def make(self, model, optimizer, context):
        return MegatronBackend(MegatronConfig(layers="local"), model=model, optimizer=optimizer, context=context)


@pytest.mark.skipif(not HAS_ENGINE, reason="no Transformer Engine")
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_transformer_engine_gives_the_same_outputs_as_the_buckets(family, tmp_path):
    path, batch = save_model(family, tmp_path, hidden_size=64, head_dim=64), make_batch().to("cuda:0")

    def make(layers):
        return MegatronBackend(
            MegatronConfig(layers=layers),
            model=ModelConfig(path=path, precision="bfloat16"),
            optimizer=GENTLE,
            context=BackendContext(device="cuda:0"),
        )

    engine, local = make("transformer_engine"), make("local")

    found, expected = (column(one.forward(batch, temperature=1.0)) for one in (engine, local))
    torch.testing.assert_close(found, expected, atol=0.1, rtol=0)
    of_engine, of_local = train(engine, batch, 3), train(local, batch, 3)
    assert [row[0] for row in of_engine] == pytest.approx([row[0] for row in of_local], rel=0.1, abs=0.1)


def steps_of_a_rank(rank, world, directory, path, config):
    device = f"cuda:{rank}"
    torch.cuda.set_device(device)
    backend = MegatronBackend(
        MegatronConfig(layers="local", **config),
        model=ModelConfig(path=path, max_tokens_per_device=14),
        optimizer=GENTLE,
        context=BackendContext(rank=rank, world_size=world, device=device, total_steps=STEPS, seed=4),
    )
    return follow(backend, make_batch().to(device), STEPS, directory / "weights.safetensors")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"tensor_parallel": 2},
        {"tensor_parallel": 2, "sequence_parallel": True},
        {"pipeline_parallel": 2},
        {"context_parallel": 2},
    ],
    ids=str,
)
def test_two_devices_over_nccl_give_the_results_of_local_on_one(config, tmp_path):
    path = save_model("qwen3", tmp_path / "model")

    reports = run_ranks(2, steps_of_a_rank, tmp_path / "ranks", path, config, preload=PRELOAD, timeout_s=300)

    local = make_local(path, context={"device": "cuda:0", "total_steps": STEPS, "seed": 4})
    check_equal(reports, follow(local, make_batch().to("cuda:0"), STEPS, tmp_path / "whole.safetensors"), make_batch())
