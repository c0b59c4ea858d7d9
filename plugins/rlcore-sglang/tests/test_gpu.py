"""Tests that need a GPU, in bfloat16: the contract, freed memory, and CUDA graphs under new weights."""

from dataclasses import replace

import pytest
import torch
from rlcore_sglang import SGLangConfig, SGLangRollout
from test_engine import BFLOAT16_TOLERANCE, compare

from rlcore.protocols.backend import ModelConfig
from rlcore.protocols.rollout import RolloutContext
from rlcore.testing import ModelRolloutContract
from rlcore.testing.rollout import request, run, tokens, weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.device_count(), reason="no CUDA device")]
SHARE = 0.3
"""Fraction of a device, so that the engines of two tests fit."""


def on_gpu(path, **config):
    config = SGLangConfig(**({"max_batch_size": 16, "gpu_memory_utilization": SHARE} | config))
    model = ModelConfig(path=path, precision="bfloat16")
    return SGLangRollout(config, model=model, context=RolloutContext(device="cuda:0"))


class TestOnGPU(ModelRolloutContract):
    device = "cuda:0"
    tolerance = BFLOAT16_TOLERANCE

    def make(self, model, context):
        config = SGLangConfig(max_batch_size=16, gpu_memory_utilization=SHARE)
        return SGLangRollout(config, model=replace(model, precision="bfloat16"), context=context)

    @pytest.fixture
    def model_path(self, small_model):
        return small_model


@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("family", ["tiny_qwen3", "tiny_qwen3_moe"])
def test_new_weights_are_used_eagerly_and_in_cuda_graphs(enforce_eager, family, request):
    model = request.getfixturevalue(family)
    engine = on_gpu(model, enforce_eager=enforce_eager)
    try:
        for how in ("as loaded", "memory", "disk"):
            compare(engine, model, how, BFLOAT16_TOLERANCE)
    finally:
        engine.close()


def test_a_sleeping_engine_frees_its_memory_and_wakes_with_its_weights(small_model):
    engine = on_gpu(small_model)
    try:
        engine.load_weights(iter([(name, tensor * 1.2) for name, tensor in weights(small_model)]), 1)
        asked = [request(i, temperature=0.0) for i in range(4)]
        wanted, awake = tokens(run(engine, asked)), used()
        engine.sleep()
        asleep = used()
        engine.wake()
        assert awake - asleep > SHARE * torch.cuda.mem_get_info()[1] / 2, (
            "most of the engine's memory must be its KV cache"
        )
        assert tokens(run(engine, asked)) == wanted
    finally:
        engine.close()


def used():
    free, total = torch.cuda.mem_get_info()
    return total - free
