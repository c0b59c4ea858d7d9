"""Mapping of parameters to Hugging Face tensors: exact positions, and round trips on any number of devices."""

import pytest
import torch
import transformers
from rlcore_megatron.families import FAMILIES, Family, Rule, family_of, unknown_tensors
from rlcore_megatron.files import TensorFiles, write
from rlcore_megatron.layout import Entry, Plan, Slice, check_once
from safetensors.torch import save_file

from rlcore.errors import ModelError


def qkv(devices):
    """Return an entry with two groups of two query heads, head size 3: q has 12 rows, k and v 6 each."""
    return Entry(
        theirs=("q", "k", "v"),
        shape=(24 // devices, 2),
        dtype=torch.float32,
        cut=0,
        join="grouped",
        devices=devices,
        per_group=2,
        head_size=3,
    )


def test_heads_are_interleaved_group_by_group():
    q, k, v = torch.arange(12), torch.arange(100, 106), torch.arange(200, 206)

    woven = qkv(1).weave([part[:, None].repeat(1, 2) for part in (q, k, v)])

    first = [0, 1, 2, 3, 4, 5, 100, 101, 102, 200, 201, 202]
    second = [6, 7, 8, 9, 10, 11, 103, 104, 105, 203, 204, 205]
    assert woven[:, 0].tolist() == first + second


def test_a_device_has_its_slice_of_each_part():
    found = qkv(2).slices(1)

    assert [(where.name, where.start, where.stop, where.shape) for where in found] == [
        ("q", 6, 12, (12, 2)),
        ("k", 3, 6, (6, 2)),
        ("v", 3, 6, (6, 2)),
    ]


def test_padding_of_the_vocabulary_is_in_no_slice():
    entry = Entry(
        theirs=("lm_head.weight",),
        shape=(4, 2),
        dtype=torch.float32,
        cut=0,
        join="one",
        devices=3,
        vocabulary=7,
    )

    assert [(where.start, where.stop) for device in range(3) for where in entry.slices(device)] == [
        (0, 4),
        (4, 7),
        (7, 7),
    ]
    assert entry.weave([torch.ones(3, 2)]).sum(1).tolist() == [2, 2, 2, 0]
    assert len(entry.whole([torch.ones(4, 2)] * 3)[0]) == 7


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("kind", ["qkv", "gate and up", "columns"])
def test_full_tensors_are_restored_from_their_parts(kind, devices, tmp_path):
    entries = {
        "qkv": qkv(devices),
        "gate and up": Entry(
            theirs=("gate", "up"),
            shape=(16 // devices, 2),
            dtype=torch.float32,
            cut=0,
            join="stacked",
            devices=devices,
        ),
        "columns": Entry(
            theirs=("down",), shape=(3, 8 // devices), dtype=torch.float32, cut=1, join="one", devices=devices
        ),
    }
    entry = entries[kind]
    generator = torch.Generator().manual_seed(1)
    wholes = {where.name: torch.randn(where.shape, generator=generator) for where in entry.slices(0)}
    save_file(wholes, tmp_path / "model.safetensors")

    with TensorFiles(tmp_path, tmp_path.glob("*.safetensors")) as files:
        shards = [entry.weave([files.read(where) for where in entry.slices(device)]) for device in range(devices)]

    assert all(shard.shape == entry.shape for shard in shards)
    for name, tensor in zip(entry.theirs, entry.whole(shards)):
        assert torch.equal(tensor, wholes[name])


@pytest.mark.parametrize("axis", [0, 1])
def test_slices_are_assembled_from_stored_slices(axis, tmp_path):
    whole = torch.arange(60.0).reshape(6, 10)
    for i, (start, stop) in enumerate([(0, 2), (2, 3), (3, whole.shape[axis])]):
        part = whole.narrow(axis, start, stop - start)
        write(tmp_path / f"{i}.safetensors", {"x": part}, {"x": Slice("x", axis, start, stop, (6, 10))})

    with TensorFiles(tmp_path, tmp_path.glob("*.safetensors")) as files:
        files.check([Slice("x", 0, 1, 5, (6, 10))])
        rows, columns = (files.read(Slice("x", axis, 1, 5, (6, 10))) for axis in (0, 1))

    assert torch.equal(rows, whole[1:5])
    assert torch.equal(columns, whole[:, 1:5])


class _Config:
    model_type = "qwen3"
    attention_bias = True


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        (
            "gemma3",
            "model.path=DIR has model_type 'gemma3', but backend=megatron has tables only for llama, qwen2, qwen3, qwen3_moe\n"
            "Type  backend=fsdp, or add a table: README of rlcore-megatron, 'Adding a model family'",
        ),
        (
            "qwen3",
            "model.path=DIR has attention_bias=True, but backend=megatron supports qwen3 only with attention_bias=False\n"
            "Type  backend=fsdp",
        ),
    ],
)
def test_a_model_without_a_table_is_refused(model_type, message):
    config = _Config()
    config.model_type = model_type

    with pytest.raises(ModelError) as refused:
        family_of(config, FAMILIES, "DIR")

    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("config_class", "changes", "setting"),
    [
        ("Qwen2Config", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("Qwen3Config", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("Qwen3MoeConfig", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("MistralConfig", {"sliding_window": 4096}, "sliding_window=4096"),
        ("Llama4TextConfig", {"attention_chunk_size": 8192}, "attention_chunk_size=8192"),
    ],
)
def test_attention_window_is_refused(config_class, changes, setting):
    config = getattr(transformers, config_class)(**changes)
    tables = {"mistral": FAMILIES["llama"], "llama4_text": FAMILIES["llama"], **FAMILIES}

    with pytest.raises(ModelError, match=f"DIR has {setting}, but backend=megatron .*\nType  backend=fsdp"):
        family_of(config, tables, "DIR")


@pytest.mark.parametrize("config_class", ["LlamaConfig", "Qwen2Config", "Qwen3Config", "Qwen3MoeConfig"])
def test_unused_attention_window_is_accepted(config_class):
    config = getattr(transformers, config_class)(sliding_window=4096, norm_topk_prob=True)

    assert family_of(config, FAMILIES, "DIR") is FAMILIES[config.model_type]


def test_a_parameter_without_a_rule_is_refused():
    plan = Plan(
        family=Family(rules=(Rule(ours="a.weight", theirs=("a",)),)),
        config=_Config(),
        devices=1,
        tied=False,
        is_critic=False,
    )

    with pytest.raises(ModelError) as refused:
        plan.entry("decoder.layers.0.b.weight", torch.zeros(2), first_layer=0, first_expert=0)

    assert str(refused.value) == (
        "the table of model_type 'qwen3' has no rule for the parameter decoder.layers.0.b.weight\n"
        "Add  Rule(ours='b.weight', theirs=(…,))  to its rules."
    )


def test_a_tensor_used_by_two_parameters_is_refused():
    with pytest.raises(ModelError, match="uses q for two parameters\n"):
        check_once([qkv(1), qkv(1)], "mine")


def test_tensors_without_a_rule_are_found():
    names = [
        "model.layers.3.mlp.experts.17.up_proj.weight",
        "model.layers.3.mlp.experts.17.up_proj.bias",
        "model.norm.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "vision.weight",
    ]

    assert unknown_tensors(FAMILIES["qwen3_moe"], names) == [names[1], names[4]]
