"""Weights that do not belong to their config.json, or are not finite: refused with the name of a tensor."""

import json
from pathlib import Path

import pytest
import torch
from rlcore_tests.families import make_family
from safetensors.torch import load_file, save_file

from rlcore.errors import ModelError
from rlcore.models.load import load_model
from rlcore.models.size import ModelSize
from rlcore.models.weights import weight_files
from tests.models import make_backend
from tests.test_families import make_engine


def change_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(directory, change):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize("make", [make_backend, make_engine, load_model], ids=["local", "hf", "load_model"])
def test_config_with_fewer_layers_than_the_weights_is_refused(make, tmp_path):
    make_family("llama").save_pretrained(tmp_path)
    change_config(tmp_path, num_hidden_layers=1)

    with pytest.raises(ModelError) as refused:
        make(str(tmp_path))

    assert str(refused.value) == (
        f"model.path={tmp_path} holds 9 weights that do not fit its config.json, the first is"
        " model.layers.1.input_layernorm.weight\n"
        "Use the config.json of these weights: with fewer layers, for example, a smaller model would be trained."
    )


@pytest.mark.parametrize("read", [load_model, lambda path: ModelSize.read(Path(path))], ids=["load_model", "plan"])
def test_config_that_contradicts_itself_is_refused(read, tmp_path):
    make_family("qwen2").save_pretrained(tmp_path)
    change_config(tmp_path, num_hidden_layers=1)  # it has two layer_types

    with pytest.raises(ModelError, match=r"config.json .*: `num_hidden_layers` \(1\) must be .*\nCopy the whole"):
        read(str(tmp_path))


@pytest.mark.parametrize(
    ("model_type", "names"),
    [
        ("llama", ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.1.self_attn.rotary_emb.inv_freq"]),
        ("gpt_neox", ["gpt_neox.layers.0.attention.bias", "gpt_neox.layers.0.attention.masked_bias"]),
        ("deepseek_v3", [f"model.layers.2.{part}.weight" for part in ("eh_proj", "enorm", "self_attn.o_proj")]),
    ],
    ids=["rotary frequencies", "declared by the class", "multi-token prediction"],
)
def test_weights_that_no_model_computes_with_are_ignored(model_type, names, tmp_path):
    make_family(model_type).save_pretrained(tmp_path)
    change_weights(tmp_path, lambda tensors: tensors.update({name: torch.ones(2) for name in names}))

    load_model(str(tmp_path))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("make", [make_backend, make_engine], ids=["local", "hf"])
def test_weight_that_is_not_finite_is_named(make, value, tmp_path):
    make_family("llama").save_pretrained(tmp_path)
    change_weights(tmp_path, lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"][3, :2].fill_(value))

    with pytest.raises(ModelError) as refused:
        make(str(tmp_path))

    assert str(refused.value) == (
        f"model.path={tmp_path}: model.layers.1.mlp.up_proj.weight has 2 values that are not finite\n"
        "Copy the whole directory again; if it came from training, use an earlier checkpoint."
    )


def test_large_finite_weights_are_accepted(tmp_path):
    make_family("llama").save_pretrained(tmp_path)
    change_weights(tmp_path, lambda tensors: tensors["model.embed_tokens.weight"][5:].fill_(3e38))

    load_model(str(tmp_path))


def test_weight_files_are_those_that_transformers_reads(tmp_path):
    for name in ("consolidated", "model-1", "model-2"):
        save_file({name: torch.ones(1)}, tmp_path / f"{name}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))

    assert [path.name for path in weight_files(tmp_path)] == ["model-1.safetensors", "model-2.safetensors"]

    save_file({"model": torch.ones(1)}, tmp_path / "model.safetensors")
    assert [path.name for path in weight_files(tmp_path)] == ["model.safetensors"]
