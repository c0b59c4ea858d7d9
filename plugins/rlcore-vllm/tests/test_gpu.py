"""Tests that need a GPU: the contract, freed memory, CUDA graphs under new weights, and runs with device sharing."""

import json

import pytest
import torch
from conftest import make_hf, requests_of, run, tokens
from models import save_tiny
from rlcore_vllm import VLLMConfig, VLLMRollout
from test_equals_hf import PROMPTS, changed_weights

from rlcore.cli.train import run as train
from rlcore.protocols.backend import ModelConfig
from rlcore.protocols.rollout import RolloutContext
from rlcore.testing import ModelRolloutContract

NUM_GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not NUM_GPUS, reason="no CUDA device")]
SHARE = 0.3
"""Fraction of a device, so that the engines of two tests and a trainer fit."""
RUN = ["model.path=quickstart:model", "data.train=quickstart:train", "reward=sorted_digits", "trackers=jsonl"]
RUN += ["trainer.steps=3", "trainer.prompts_per_step=16", "sampling.samples_per_prompt=4", "run.name=run"]
RUN += ["sampling.max_response_tokens=8", "rollout=vllm", f"rollout.gpu_memory_utilization={SHARE}"]


def on_gpu(path, **config):
    config = VLLMConfig(**({"max_batch_size": 16, "gpu_memory_utilization": SHARE} | config))
    return VLLMRollout(config, model=ModelConfig(path=path), context=RolloutContext(device="cuda:0"))


class TestOnGPU(ModelRolloutContract):
    device = "cuda:0"
    tolerance = 2e-3

    def make(self, model, context):
        return VLLMRollout(VLLMConfig(max_batch_size=16, gpu_memory_utilization=SHARE), model=model, context=context)

    @pytest.fixture
    def model_path(self, small_model):
        return small_model


@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "graphs"])
def test_new_weights_are_used_eagerly_and_in_cuda_graphs(enforce_eager, small_model, tmp_path):
    path = save_tiny("Qwen3", tmp_path, small_model)
    mine, reference = on_gpu(path, enforce_eager=enforce_eager), make_hf(path)
    try:
        for version, scale in ((1, 1.3), (2, 0.8)):
            for engine in (mine, reference):
                engine.load_weights(iter(changed_weights(path, scale)), version)
            assert tokens(run(mine, requests_of(PROMPTS))) == tokens(run(reference, requests_of(PROMPTS)))
    finally:
        mine.close()


def test_a_sleeping_engine_frees_its_memory_and_wakes_with_its_weights(small_model):
    engine = on_gpu(small_model)
    try:
        wanted = tokens(run(engine, requests_of(PROMPTS)))
        awake = used()
        engine.sleep()
        asleep = used()
        engine.wake()
        total = torch.cuda.mem_get_info()[1]
        assert awake - asleep > SHARE * total / 2, "most of the engine's memory must be its KV cache"
        engine.load_weights(iter(changed_weights(small_model, 1.0)), 1)
        assert awake - used() > SHARE * total / 2, "the KV cache must wait for the first request"
        assert tokens(run(engine, requests_of(PROMPTS))) == wanted
        assert used() == pytest.approx(awake, rel=0.1)
    finally:
        engine.close()


def test_weights_are_loaded_from_an_offloaded_trainer(small_model):
    engine = on_gpu(small_model)
    try:
        engine.load_weights(iter(changed_weights(small_model, 1.2)), 1)
        found = tokens(run(engine, requests_of(PROMPTS)))
        lent = [(name, tensor.cuda()) for name, tensor in changed_weights(small_model, 1.2)]
        engine.load_weights(iter(lent), 2)
        assert tokens(run(engine, requests_of(PROMPTS))) == found
    finally:
        engine.close()


@pytest.mark.slow
def test_a_run_on_one_gpu_shares_it_between_engine_and_trainer(tmp_path):
    train([*RUN, f"run.directory={tmp_path}", "runtime=ray"], dry_run=False)
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()][1:]
    engine = SHARE * torch.cuda.mem_get_info()[1] / 2**30
    for step in steps:
        assert step["actor/rollout_logprob_gap"] < 1e-2
        assert step["memory_gb/before_to_training"] - step["memory_gb/after_to_training"] > engine / 2


@pytest.mark.slow
@pytest.mark.skipif(NUM_GPUS < 2, reason="two CUDA devices")
def test_weights_are_broadcast_from_one_gpu_to_another(tmp_path):
    more = ["runtime=ray", "placement=split", "transfer=collective"]
    train([*RUN, f"run.directory={tmp_path}", *more], dry_run=False)
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()][1:]
    assert [step["actor/rollout_logprob_gap"] < 1e-2 for step in steps] == [True] * 3


def used():
    free, total = torch.cuda.mem_get_info()
    return total - free
