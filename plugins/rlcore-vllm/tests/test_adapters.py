"""Adapter-only updates: the engine generates the same as the merged model and refuses factors that do not fit."""

import pytest
import torch
from conftest import make_hf, make_vllm, requests_of, run, tokens
from models import save_tiny

from rlcore.errors import ConfigError, InfrastructureError, ModelError
from rlcore.models.load import load_model

PROMPTS = [[5, 9, 11], [3], list(range(4, 44)), list(range(4, 44))]


def factors_of(path, rank, seed, targets=("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")):
    """Return random factors, B already scaled, under the names that a backend sends."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, matrix in load_model(path).named_parameters():
        layer = name.removesuffix(".weight")
        if layer.endswith(targets) and matrix.dim() == 2:
            rows, columns = matrix.shape
            found[f"{layer}.lora_A.weight"] = torch.randn(rank, columns, generator=generator) * 0.3
            found[f"{layer}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) * 0.3
    return found


def merged(path, factors):
    model = load_model(path).requires_grad_(False)
    for name, a in factors.items():
        if ".lora_A." in name:
            model.get_parameter(name.replace(".lora_A", "")).add_(factors[name.replace("lora_A", "lora_B")] @ a)
    return model.named_parameters()


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_greedy_responses_equal_those_of_the_merged_model_before_and_after_each_update(family, small_model, tmp_path):
    path = save_tiny(family, tmp_path, small_model)
    mine, reference = make_vllm(path, lora_rank=6), make_hf(path)
    try:
        seen = []
        for version, seed in ((0, None), (1, 1), (2, 2)):
            if seed is not None:
                factors = factors_of(path, 6, seed)
                mine.load_weights(iter(factors.items()), version)
                reference.load_weights(iter(merged(path, factors)), version)
            found, expected = run(mine, requests_of(PROMPTS)), run(reference, requests_of(PROMPTS))
            assert tokens(found) == tokens(expected)
            for request_id, sample in expected.items():
                assert list(found[request_id].log_probs) == pytest.approx(list(sample.log_probs), abs=2e-4)
                assert found[request_id].policy_version == version
            seen.append(tokens(found))
        assert seen[0] != seen[1] != seen[2], "the adapters must change the responses for the test to be meaningful"
    finally:
        mine.close()


@pytest.fixture(scope="module")
def engine(small_model):
    engine = make_vllm(small_model, lora_rank=4)
    yield engine
    engine.close()


def without(factors, ending):
    return {name: tensor for name, tensor in factors.items() if not name.endswith(ending)}


def test_factors_that_do_not_fit_are_refused_until_a_complete_update_arrives(engine, small_model):
    whole = factors_of(small_model, 4, seed=1)
    engine.load_weights(iter(whole.items()), 1)
    first = next(name for name in whole if ".lora_A." in name)
    last = list(whole)[-1]
    bad = {
        "are incomplete": without(whole, last),
        "is not a LoRA factor": {"model.norm.weight": torch.zeros(64)},
        r"has rank 6\nType  rollout.lora_rank=6": factors_of(small_model, 6, seed=1),
        "does not fit": {**whole, first: torch.zeros(4, 3)},
        "are incomplete: .*mlp.down_proj": without(
            without(whole, "down_proj.lora_A.weight"), "down_proj.lora_B.weight"
        ),
    }
    for text, factors in bad.items():
        with pytest.raises(ModelError, match=text):
            engine.load_weights(iter(factors.items()), 2)
        with pytest.raises(InfrastructureError, match="incomplete weights"):
            run(engine, requests_of([[5]]))

    engine.load_weights(iter(whole.items()), 3)
    assert run(engine, requests_of([[5]]))[0].policy_version == 3


def test_matrices_that_vllm_cannot_adapt_are_refused_and_merged_weights_suggested(engine, small_model):
    factors = factors_of(small_model, 4, seed=1) | factors_of(small_model, 4, seed=1, targets=("embed_tokens",))
    with pytest.raises(ModelError, match=r"backend\.lora_sync=merged"):
        engine.load_weights(iter(factors.items()), 4)


def test_full_models_and_adapters_are_refused_by_an_engine_for_the_other(engine, small_model):
    with pytest.raises(ModelError, match=r"backend\.lora_sync=adapters"):
        engine.load_weights(iter(load_model(small_model).named_parameters()), 1)
    with pytest.raises(ModelError, match="adapters merged"):
        make_hf(small_model).load_weights(iter(factors_of(small_model, 4, seed=1).items()), 1)


def test_adapters_are_refused_with_servers(small_model):
    with pytest.raises(ConfigError, match=r"rollout\.url"):
        make_vllm(small_model, lora_rank=4, url="http://localhost:1")
