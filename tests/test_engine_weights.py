"""Weights sent to an engine: names and shapes are checked, and tensors are split as in the model's files."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen3MoeConfig

from rlcore.errors import ModelError
from rlcore.kits.engine.checks import ExpectedWeights

SIZES = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
FAMILIES = {
    "llama": LlamaConfig(**SIZES),
    "llama, tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=3),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, head_dim=8, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=8, tie_word_embeddings=False
    ),
}


@pytest.fixture(params=list(FAMILIES))
def model(request, tmp_path):
    model = AutoModelForCausalLM.from_config(FAMILIES[request.param])
    model.save_pretrained(tmp_path)
    return model


def test_parameters_come_out_as_the_files_have_them(model, tmp_path):
    stored = load_file(tmp_path / "model.safetensors")

    found = dict(ExpectedWeights(str(tmp_path)).checked(model.named_parameters(), version=1))

    assert found.keys() == stored.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, stored[name]), name


@pytest.mark.parametrize("more", [[], ["model.embed_tokens.weight"]], ids=["only", "first"])
def test_tied_weights_come_out_once_under_the_name_of_the_files_whichever_comes(more, tmp_path):
    model = AutoModelForCausalLM.from_config(FAMILIES["llama, tied"])
    model.save_pretrained(tmp_path)
    named = [(name.replace("model.embed_tokens", "lm_head"), it) for name, it in model.named_parameters()]
    named += [(name, model.get_parameter(name)) for name in more]

    found = list(ExpectedWeights(str(tmp_path)).checked(iter(named), version=1))

    assert [name for name, _ in found] == [name for name, _ in model.named_parameters()]


def test_each_comes_out_before_the_next_is_asked_for(model, tmp_path):
    asked = []

    def weights():
        for name, parameter in model.named_parameters():
            asked.append(name)
            yield name, parameter

    checked = ExpectedWeights(str(tmp_path)).checked(weights(), version=1)

    next(checked)
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda name, tensor: (name, tensor[:-1]), "is .* in the rollout's model"),
        (lambda name, tensor: (f"{name}.more", tensor), "is unknown in the rollout's model"),
        (lambda name, tensor: None, "1 weights are missing, the first is"),
    ],
)
def test_a_weight_that_does_not_fit_ends_the_update(change, text, model, tmp_path):
    weights = [item for item in model.named_parameters() if not item[0].endswith("norm.weight")]
    kept = [item for item in model.named_parameters() if item[0].endswith("norm.weight")]
    last = change(*weights[-1])
    stream = iter([*kept, *weights[:-1], *([last] if last else [])])

    with pytest.raises(ModelError, match=f"version 4 of the weights does not fit the rollout: .*{text}"):
        list(ExpectedWeights(str(tmp_path)).checked(stream, version=4))
