"""Fixtures: one thread, no network, and one engine for all tests that do not start their own.

Without SGLang's kernels, run tests/plain_cpu/enable.py in this virtual environment first.
"""

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from rlcore_sglang import SGLangConfig, SGLangRollout

from rlcore.models.load import copy_tokenizer, load_tokenizer
from rlcore.protocols.backend import ModelConfig
from rlcore.protocols.rollout import RolloutContext
from rlcore.testing.model import small_model as make_small_model


def pytest_configure(config):
    from rlcore_tests.gpus import hide_gpus

    hide_gpus(config)


@pytest.fixture(scope="session")
def small_model(tmp_path_factory):
    """A Qwen2 with tied embeddings."""
    return make_small_model(tmp_path_factory.getbasetemp())


@pytest.fixture(scope="session")
def tiny_llama(small_model, tmp_path_factory):
    """A random Llama with grouped-query attention and an untied output layer."""
    return tiny_model("llama", small_model, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def tiny_qwen2(small_model, tmp_path_factory):
    """A random Qwen2."""
    return tiny_model("qwen2", small_model, tmp_path_factory.mktemp("qwen2"))


@pytest.fixture(scope="session")
def tiny_qwen3(small_model, tmp_path_factory):
    """A random Qwen3: normalized queries and keys, and a head size that does not follow from the hidden size."""
    return tiny_model("qwen3", small_model, tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="session")
def tiny_qwen3_moe(small_model, tmp_path_factory):
    """A random Qwen3 with a mixture of four experts, two for each token."""
    return tiny_model("qwen3_moe", small_model, tmp_path_factory.mktemp("qwen3_moe"))


def tiny_model(family, tokenizer_from, directory):
    """Save a random model with weights large enough that the most likely tokens stand out."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    options = {"head_dim": 24} if family.startswith("qwen3") else {}
    if family == "qwen3_moe":
        options |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    config = AutoConfig.for_model(
        family,
        vocab_size=len(load_tokenizer(tokenizer_from)),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
        **options,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    copy_tokenizer(Path(tokenizer_from), directory)
    return str(directory)


@pytest.fixture(scope="session")
def shared_engine(small_model):
    """An engine in its own process, with the version and weights left by the previous test."""
    engine = SGLangRollout(
        SGLangConfig(max_batch_size=16), model=ModelConfig(path=small_model), context=RolloutContext()
    )
    yield engine
    engine.close()
