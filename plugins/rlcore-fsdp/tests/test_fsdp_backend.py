"""Features of this backend in one process: packing, adapters, precision, and errors for bad input."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from fsdp_cases import PRELOAD, fsdp_weights, local_weights, make_fsdp, make_local
from rlcore_fsdp import FSDPBackend, FSDPConfig
from rlcore_fsdp.attention import fits_kernel
from rlcore_fsdp.memory import OutOfMemory
from rlcore_fsdp.mesh import make_grid
from rlcore_fsdp.model import find_layers
from rlcore_fsdp.tensor_parallel import check_sizes, cut
from rlcore_tests.families import WINDOW, make_family
from safetensors.torch import load_file, save_file

from rlcore.errors import ConfigError, ModelError
from rlcore.models.load import load_model
from rlcore.protocols.backend import BackendContext, ModelConfig, OptimizerConfig
from rlcore.registry import versions
from rlcore.testing import run_ranks
from rlcore.testing.training import FAMILIES, GENTLE, make_batch, policy_loss, save_model, train


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {family: save_model(family, root / family) for family in FAMILIES}


@pytest.fixture
def path(paths):
    return paths["qwen2"]


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_samples_give_the_same_outputs_as_single_samples(family, paths):
    batch = make_batch()
    own = load_model(paths[family], attention="eager")

    out = make_fsdp(paths[family], max_tokens_per_device=30).forward(batch, temperature=0.7)

    for start, length in zip(batch.offsets().tolist(), batch.lengths.tolist()):
        ids = batch["input_ids"][start : start + length]
        with torch.no_grad():
            log_p = (own(ids[None], use_cache=False).logits[0, :-1].double() / 0.7).log_softmax(-1)
        expected = log_p.gather(-1, ids[1:, None]).squeeze(-1)[1:]
        entropy = -(log_p.exp() * log_p).sum(-1)[1:]
        here = slice(start + 2, start + length)
        torch.testing.assert_close(out.log_probs[here].double(), expected, atol=5e-5, rtol=1e-5)
        torch.testing.assert_close(out.entropy[here].double(), entropy, atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize("head", ["token", "value"])
def test_a_batch_without_rows_or_loss_tokens_gives_zeros_and_changes_no_weights(head, path):
    backend = make_fsdp(path, context={"head": head}, optimizer=OptimizerConfig(lr=0.1))
    before = fsdp_weights(backend)

    for lengths in ([], [0, 0], [2, 1]):
        batch = make_batch(lengths)
        out = backend.forward(batch, temperature=1.0)
        column = out.log_probs if head == "token" else out.values
        assert column.tolist() == [0.0] * sum(lengths)
        train(backend, batch, 1)

    assert all(torch.equal(tensor, before[name]) for name, tensor in fsdp_weights(backend).items())


def test_a_critic_loads_the_value_head_saved_with_its_model(tmp_path):
    path, batch = save_model("qwen2", tmp_path), make_batch()
    critics = {"context": {"head": "value"}}
    fresh = make_fsdp(path, **critics).forward(batch, temperature=1.0).values
    save_file({"value_head.weight": torch.randn(1, 32)}, tmp_path / "value_head.safetensors")

    found = make_fsdp(path, **critics).forward(batch, temperature=1.0).values

    expected = make_local(path, **critics).forward(batch, temperature=1.0).values
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
    assert float((found - fresh).abs().max()) > 0.1


@pytest.mark.parametrize("reshard", [True, False], ids=["resharded", "kept"])
def test_a_reference_shares_the_weights_of_the_policy_with_adapters_off(reshard, path):
    batch, config = make_batch(), {"lora_rank": 2, "reshard_after_forward": reshard}
    reference = make_fsdp(path, config=config, context={"trained": False})
    policy = make_fsdp(path, config=config)
    start = reference.forward(batch, temperature=1.0).log_probs
    train(policy, batch, 4)

    after, trained = (one.forward(batch, temperature=1.0).log_probs for one in (reference, policy))

    assert torch.equal(after, start)
    assert float((trained - start).abs().max()) > 1e-3
    assert train(policy, batch, 1)[0][1] > 0, "the policy's adapters must stay trainable"
    ours, theirs = ({p.data_ptr() for p in one._packed.parameters()} for one in (policy, reference))
    assert ours == theirs


def test_a_policy_recomputes_activations_if_its_reference_was_created_first(path):
    options = {"config": {"lora_rank": 2}, "gradient_checkpointing": True}
    alone = {"seed": 16}  # a seed of its own, so that no model of another test is shared
    reference = make_fsdp(path, context=alone | {"trained": False}, **options)

    policy = make_fsdp(path, context=alone, **options)

    assert policy._packed is reference._packed
    assert all(
        layer.gradient_checkpointing and layer.training for layer in find_layers(policy._packed.model, "model.layers")
    )
    plain = make_fsdp(path, config={"lora_rank": 2}, context=alone)
    assert train(policy, make_batch(), 2) == train(plain, make_batch(), 2)


def test_two_policies_of_one_process_do_not_share_adapters(path):
    first, second = (make_fsdp(path, config={"lora_rank": 2}) for _ in range(2))
    before = dict(second.weights())

    train(first, make_batch(), 2)

    assert all(torch.equal(tensor, before[name]) for name, tensor in second.weights())


def test_training_adapters_changes_only_the_targeted_weights(path):
    backend = make_fsdp(path, config={"lora_rank": 2, "lora_targets": ("q_proj", "v_proj")})
    before = dict(load_model(path).named_parameters())

    train(backend, make_batch(), 3)

    moved = {name for name, tensor in backend.weights() if not torch.equal(tensor, before[name].detach())}
    expected = {f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in (0, 1) for part in "qv"}
    assert moved == expected


def test_adapters_sent_alone_equal_the_difference_to_the_merged_weights(path):
    """W + B A equals the merged weight, because B is sent multiplied by alpha / rank."""
    config = {"lora_rank": 2, "lora_alpha": 6.0, "lora_targets": ("q_proj", "down_proj")}
    merged, alone = (make_fsdp(path, config=config | {"lora_sync": way}) for way in ("merged", "adapters"))
    for backend in (merged, alone):
        train(backend, make_batch(), 3)
    before = {name: tensor.detach() for name, tensor in load_model(path).named_parameters()}

    whole, factors = dict(merged.weights()), dict(alone.weights())

    layers = {name.partition(".lora_")[0] for name in factors}
    assert layers == {f"model.layers.{i}.{part}" for i in (0, 1) for part in ("self_attn.q_proj", "mlp.down_proj")}
    for layer in layers:
        product = factors.pop(f"{layer}.lora_B.weight") @ factors.pop(f"{layer}.lora_A.weight")
        assert torch.allclose(before[f"{layer}.weight"] + product, whole[f"{layer}.weight"], atol=1e-7)
        assert float(product.abs().max()) > 1e-4
    assert not factors


def test_bfloat16_is_close_to_float32_and_parameters_stay_float32(path):
    batch = make_batch()
    exact, rough = make_fsdp(path), make_fsdp(path, precision="bfloat16")

    gap = exact.forward(batch, temperature=1.0).log_probs - rough.forward(batch, temperature=1.0).log_probs
    history = train(rough, batch, 2)

    assert 1e-4 < float(gap.abs().max()) < 0.5
    assert history[1][0] != history[0][0]
    assert {parameter.dtype for parameter in rough._names} == {torch.float32}
    assert {tensor.dtype for _, tensor in rough.weights()} == {torch.bfloat16}


def test_a_critic_in_bfloat16_has_a_float32_head(path):
    critic, states = make_fsdp(path, context={"head": "value"}, precision="bfloat16"), []
    hidden = critic._packed.hidden
    critic._packed.hidden = lambda *args: states.append(hidden(*args)) or states[0]

    values = critic.forward(make_batch([3]), temperature=1.0).values

    assert states[0].dtype == torch.bfloat16
    expected = states[0][1].float() @ fsdp_weights(critic)["value_head.weight"][0]
    assert float(values[2]) == pytest.approx(float(expected), rel=1e-6)


def test_muon_moves_matrices_of_layers_and_adamw_the_rest(path):
    backend = make_fsdp(path, config={"optimizer": "muon"}, optimizer=GENTLE)
    muon = next(one for one in backend._optimizer._all if isinstance(one, torch.optim.Muon))

    names = {backend._names[p] for group in muon.param_groups for p in group["params"]}

    assert len(names) == 2 * 7  # two layers of q, k, v, o, gate, up and down
    assert all(name.startswith("model.layers.") for name in names)


def test_sgd_trains_like_the_local_backend_and_resumes(path, tmp_path):
    optimizer, batch = OptimizerConfig(name="sgd", lr=0.1, momentum=0.9), make_batch()
    fsdp, local = make_fsdp(path, optimizer=optimizer), make_local(path, optimizer=optimizer)
    train(fsdp, batch, 2)
    fsdp.save(tmp_path)
    again = make_fsdp(path, optimizer=optimizer)
    again.load(tmp_path)

    train(local, batch, 2)
    found = [train(it, batch, 1) for it in (fsdp, again)]
    train(local, batch, 1)

    assert found[0] == found[1]
    for name, expected in local_weights(local).items():
        torch.testing.assert_close(fsdp_weights(fsdp)[name], expected, atol=2e-5, rtol=1e-5)
    with pytest.raises(ConfigError, match=r"optimizer.name=sgd and backend.optimizer=muon exclude each other\nType"):
        make_fsdp(path, config={"optimizer": "muon"}, optimizer=optimizer)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:The .grad attribute:UserWarning"
)  # raised by the compiler
def test_compiled_layers_give_the_same_results(tmp_path):
    path, batch = save_model("qwen2", tmp_path, num_hidden_layers=1), make_batch()
    plain, compiled = make_fsdp(path), make_fsdp(path, config={"compile": True})

    expected, found = train(plain, batch, 2), train(compiled, batch, 2)

    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("config", "world_size", "message"),
    [
        (
            {"replicate": 2, "tensor_parallel": 2},
            6,
            "6 devices cannot be divided by replicate 2 · tensor_parallel 2 = 4\n"
            "Give the pool 4, 8, 12, 16, … devices, or a product of 1, 2, 3, 6:  backend.replicate=1",
        ),
        (
            {"context_parallel": 3},
            2,
            "2 devices cannot be divided by context_parallel 3 = 3\n"
            "Give the pool 3, 6, 9, 12, … devices, or a product of 1, 2:  backend.context_parallel=1",
        ),
    ],
    ids=["hybrid and tensor", "context"],
)
def test_a_grid_that_does_not_fit_is_refused_with_the_sizes_that_do(config, world_size, message):
    with pytest.raises(ConfigError) as refused:
        make_grid(FSDPConfig(**config), BackendContext(world_size=world_size))

    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("settings", "start"),
    [
        ({"replicate": 0}, "replicate: expected 1 or more, got 0"),
        ({"lora_sync": "adapters"}, "lora_sync: expected merged unless lora_rank is above 0, got adapters"),
        ({"lora_rank": -1}, "lora_rank: expected 0 or more, got -1"),
        ({"context_parallel": 2, "tensor_parallel": 2}, "context_parallel: expected 1 when tensor_parallel is above 1"),
    ],
    ids=["zero replicas", "no adapters to send", "negative rank", "context and tensor"],
)
def test_contradictory_settings_are_refused(settings, start):
    with pytest.raises(ConfigError) as refused:
        FSDPConfig(**settings)

    assert str(refused.value).startswith(start)
    assert "\nType  " in str(refused.value)


def test_error_for_undetected_layers_names_the_class_and_the_setting(path):
    model = load_model(path)
    model._no_split_modules = ["NoSuchLayer"]

    with pytest.raises(ModelError) as refused:
        find_layers(model, "")

    assert str(refused.value) == (
        "the layers of Qwen2ForCausalLM cannot be found; it has these lists: model.layers\n"
        "Type  backend.layers=model.layers"
    )
    assert find_layers(model, "model.layers") == list(model.model.layers)


@pytest.mark.parametrize("when", ["made", "planned"])
def test_a_wrong_path_of_the_layers_is_refused(when, path):
    with pytest.raises(ModelError, match=r"backend\.layers=model\.blocks is not a list of layers of Qwen2ForCausalLM"):
        planned(path, layers="model.blocks") if when == "planned" else make_fsdp(
            path, config={"layers": "model.blocks"}
        )


@pytest.mark.parametrize("when", ["made", "planned"])
@pytest.mark.parametrize("target", ["embed_tokens", "lm_head", "q_porj"])
def test_a_module_that_cannot_have_an_adapter_is_refused_with_those_that_can(target, when, path):
    config = {"lora_rank": 2, "lora_targets": ("q_proj", target)}

    with pytest.raises(ConfigError) as refused:
        planned(path, **config) if when == "planned" else make_fsdp(path, config=config)

    assert str(refused.value) == (
        f"lora_targets: {target} is not a linear module of Qwen2ForCausalLM that can have an adapter\n"
        "Type  backend.lora_targets=[down_proj,gate_proj,k_proj,o_proj,q_proj,up_proj,v_proj]  or some of them"
    )


def test_adapters_on_conv1d_modules_are_refused(tmp_path):
    import transformers

    config = transformers.GPT2Config(vocab_size=61, n_embd=32, n_head=4, n_layer=1, n_positions=64)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)

    with pytest.raises(
        ConfigError, match=r"all-linear is not a linear module of GPT2LMHeadModel.*\nType  backend.lora_rank=0"
    ):
        planned(str(tmp_path), lora_rank=2)


@pytest.mark.parametrize(
    ("size", "line"),
    [(3, "tensor_parallel=3 does not divide num_attention_heads=4"), (4, "does not divide num_key_value_heads=2")],
    ids=["heads", "key and value heads"],
)
def test_a_tensor_axis_that_does_not_divide_is_refused_with_the_sizes_that_do(size, line, path):
    with pytest.raises(ConfigError) as refused:
        check_sizes(load_model(path).config, size)

    assert line in str(refused.value)
    assert "with N one of 1, 2" in str(refused.value)


def test_tensor_parallel_experts_are_refused(paths):
    class Two:
        def size(self):
            return 2

    refused = r"Qwen3MoeForCausalLM has a plan with moe_tp_experts, packed_colwise"
    with pytest.raises(ModelError, match=refused):
        cut(load_model(paths["qwen3_moe"]), Two())
    with pytest.raises(ModelError, match=refused):
        planned(paths["qwen3_moe"], tensor_parallel=2)


def planned(path, *, world_size=8, **settings):
    """Return the number of data-parallel ranks, or raise what a plan raises."""
    return FSDPBackend.data_parallel(
        FSDPConfig(**settings), model=ModelConfig(path=path), world_size=world_size, device="cpu"
    )


def test_plan_counts_the_data_parallel_ranks(path):
    assert planned(path) == planned(path, replicate=4) == 8
    assert planned(path, replicate=2, tensor_parallel=2) == 4
    assert planned(path, context_parallel=2) == 4


@pytest.mark.parametrize(
    ("given", "first"),
    [
        ({"world_size": 6, "replicate": 4}, "6 devices cannot be divided by replicate 4"),
        ({"tensor_parallel": 4}, "tensor_parallel=4 does not divide num_key_value_heads=2"),
        ({"context_parallel": 4}, "context_parallel=4 does not divide num_key_value_heads=2 of this model"),
    ],
    ids=["devices", "tensor", "context"],
)
def test_sizes_that_do_not_fit_are_refused_before_anything_starts(given, first, path):
    with pytest.raises(ConfigError, match=first):
        planned(path, **given)


@pytest.mark.parametrize("check", [make_fsdp, planned], ids=["made", "planned"])
def test_positions_that_depend_on_neighbors_are_refused(check, tmp_path):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}

    with pytest.raises(ModelError, match="rope_type=dynamic: its positions depend on the longest sample"):
        check(save_model("llama", tmp_path, rope_parameters=rope))


def test_adapters_without_peft_are_refused_before_anything_starts(path, monkeypatch):
    real = versions.installed_version
    monkeypatch.setattr(versions, "installed_version", lambda name: "" if name == "peft" else real(name))

    assert planned(path) == 8
    with pytest.raises(
        ConfigError, match=r"needs peft.*which is not installed\nType  pip install 'rlcore-fsdp\[lora\]'"
    ):
        planned(path, lora_rank=4)


@pytest.mark.parametrize("make", [make_fsdp, make_local])
def test_layers_that_do_not_pass_packing_to_attention_are_refused(make, tmp_path):
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.StableLmConfig(vocab_size=61, num_key_value_heads=2, **sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)

    with pytest.raises(ModelError, match=r"cannot train StableLmForCausalLM: .*samples cannot be packed"):
        make(str(tmp_path))


@pytest.mark.parametrize(
    ("sizes", "dtype", "fits"),
    [
        ((64, 64), torch.bfloat16, True),
        ((64, 64), torch.float32, False),
        ((192, 128), torch.bfloat16, False),
        ((36, 36), torch.bfloat16, False),
        ((512, 512), torch.bfloat16, False),
    ],
    ids=["supported", "float32", "latent attention", "not a multiple of 8", "too large"],
)
def test_the_flash_kernel_is_used_for_the_head_sizes_it_supports(sizes, dtype, fits):
    query, value = (torch.empty(1, 2, 3, size, dtype=dtype) for size in sizes)

    assert fits_kernel(query, value) is fits


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        ("missing", r"lacks \d+ weights of Qwen2ForCausalLM, the first is"),
        ("garbage", "has a damaged file"),
        ("shape", r"has shape \[61, 32\], but its config.json requires \[70, 32\]"),
        ("fewer layers", r"holds 12 weights that do not fit its config.json, the first is model\.layers\.1\."),
        ("not finite", r"model\.layers\.1\.mlp\.up_proj\.weight has 1 values that are not finite\nCopy the whole"),
    ],
)
def test_a_damaged_model_directory_is_refused(damage, text, path, tmp_path):
    broken = Path(shutil.copytree(path, tmp_path / "broken"))
    file = broken / "model.safetensors"
    if damage == "missing":
        weights = load_file(file)
        del weights["model.norm.weight"]
        save_file(weights, file)
    elif damage == "garbage":
        file.write_bytes(b"\xff" * 1000)
    elif damage == "fewer layers":
        config = json.loads((broken / "config.json").read_text())
        changed = {**config, "num_hidden_layers": 1, "layer_types": config["layer_types"][:1]}
        (broken / "config.json").write_text(json.dumps(changed))
    elif damage == "not finite":
        weights = load_file(file)
        weights["model.layers.1.mlp.up_proj.weight"][3, 2] = float("nan")
        save_file(weights, file)
    else:
        config = (broken / "config.json").read_text()
        (broken / "config.json").write_text(config.replace('"vocab_size": 61', '"vocab_size": 70'))

    with pytest.raises(ModelError, match=text):
        make_fsdp(str(broken))


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v3"])
def test_stored_weights_that_the_model_does_not_use_are_ignored(model_type, tmp_path):
    make_family(model_type).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    other = {"layers.0.attention.wq.weight": torch.ones(2, 2)}
    more = (
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.2.eh_proj.weight",
        "model.layers.2.enorm.weight",
    )
    save_file(weights | {name: torch.ones(2) for name in more}, tmp_path / "model.safetensors")
    save_file(other, tmp_path / "consolidated.safetensors")

    make_fsdp(str(tmp_path))


@pytest.mark.parametrize("where", ["model", "loss"])
def test_out_of_memory_error_names_the_phase_and_the_setting_to_lower(where, path):
    backend, batch = make_fsdp(path, max_tokens_per_device=40), make_batch([9, 20])

    def exhausted(*args):
        raise torch.OutOfMemoryError("tried to allocate 20 GiB\nmuch more text")

    if where == "model":
        backend._packed.outputs = exhausted
    with pytest.raises(OutOfMemory) as refused:
        backend.forward_backward(batch, policy_loss(batch) if where == "model" else exhausted, temperature=1.0)

    assert str(refused.value) == (
        "cpu ran out of memory in forward and backward of a micro-batch of 29 tokens: tried to allocate 20 GiB\n"
        "Type  model.max_tokens_per_device=14  to halve the memory of a micro-batch (a longer sample is not split:"
        " use  backend.context_parallel=2), or  model.gradient_checkpointing=true  to recompute the activations of layers."
    )


def test_out_of_memory_error_names_reduce_gradients_if_the_full_gradient_is_held(path):
    backend, batch = make_fsdp(path, config={"reduce_gradients": "last"}), make_batch([9, 20])

    def exhausted(*args):
        raise torch.OutOfMemoryError("tried to allocate 20 GiB")

    with pytest.raises(OutOfMemory) as refused:
        backend.forward_backward(batch, exhausted, temperature=1.0)

    assert str(refused.value).endswith("\nType  backend.reduce_gradients=every  to hold only a shard of the gradients.")


def test_a_library_of_another_version_is_refused_with_the_command_to_type(path, monkeypatch):
    real = versions.installed_version
    monkeypatch.setattr(versions, "installed_version", lambda name: "2.9.1" if name == "torch" else real(name))

    with pytest.raises(ConfigError) as refused:
        make_fsdp(path)

    first, second = str(refused.value).splitlines()
    assert first.startswith("backend=fsdp was written for torch")
    assert first.endswith("and torch 2.9.1 is installed")
    assert second.startswith("Type  pip install 'torch")


def test_grid_selects_its_gpu_before_the_mesh_guesses_one(monkeypatch):
    """Fake the CUDA device; a warning fails this test."""
    selected = []
    handle = SimpleNamespace(
        is_initialized=lambda: bool(selected), device_count=lambda: 1, set_device=lambda device: None
    )
    monkeypatch.setattr("torch.cuda.set_device", selected.append)
    monkeypatch.setattr("torch.distributed.device_mesh._get_device_handle", lambda kind: handle)
    if dist.is_initialized():  # by a backend of another test
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        make_grid(FSDPConfig(), BackendContext(device="cuda:0"))
    finally:
        dist.destroy_process_group()

    assert selected == ["cuda:0"]


@pytest.mark.parametrize("model_type", ["phimoe", "qwen2_moe", "gemma3_text"])
def test_samples_longer_than_the_window_have_the_same_log_probs_as_the_unpacked_model(model_type, tmp_path):
    own = make_family(model_type)
    own.save_pretrained(tmp_path)
    batch = make_batch([3 * WINDOW + 1, 5, 2 * WINDOW])

    out = make_fsdp(str(tmp_path)).forward(batch, temperature=1.0)

    for start, length in zip(batch.offsets().tolist(), batch.lengths.tolist()):
        ids = batch["input_ids"][start : start + length]
        with torch.no_grad():
            log_p = own(ids[None], use_cache=False).logits[0, :-1].double().log_softmax(-1)
        expected = log_p.gather(-1, ids[1:, None]).squeeze(-1)[1:]
        torch.testing.assert_close(out.log_probs[start + 2 : start + length].double(), expected, atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize("make", [make_fsdp, planned], ids=["start", "plan"])
def test_chunked_attention_is_refused(make, tmp_path):
    make_family("llama4_text").save_pretrained(tmp_path)

    with pytest.raises(ModelError, match=r"llama4_text has attention in chunks of 8 tokens, .*\nNo backend takes it"):
        make(str(tmp_path))


def test_attention_that_ignores_the_window_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("rlcore.models.attention.window_of_mask", lambda *args, **options: None)
    make_family("phimoe", sliding_window=64).save_pretrained(tmp_path)

    with pytest.raises(ModelError, match=r"cannot train PhimoeForCausalLM: .* longer than its sliding_window=64"):
        make_fsdp(str(tmp_path))


def build_on_rank(rank, world, directory, path):
    """Return the error that a rank raises for a non-finite weight in the rows of the last rank."""
    try:
        make_fsdp(path, context={"rank": rank, "world_size": world})
    except ModelError as error:
        return str(error)


def test_every_rank_names_a_weight_that_is_not_finite_on_one_rank(path, tmp_path):
    broken = Path(shutil.copytree(path, tmp_path / "broken"))
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][-1, 2] = float("inf")
    save_file(weights, broken / "model.safetensors")

    reports = run_ranks(2, build_on_rank, tmp_path, str(broken), preload=PRELOAD, timeout_s=120)

    assert len(set(reports)) == 1
    assert "model.layers.1.mlp.up_proj.weight has 1 values that are not finite\n" in reports[0]
