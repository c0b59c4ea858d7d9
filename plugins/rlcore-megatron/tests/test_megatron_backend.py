"""Features of this backend: memory, precision, grids in one process, additional model families, and bad input."""

import importlib.util
import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cpu_double import CPUMegatron
from megatron_cases import PRELOAD, another_megatron, make_local, make_megatron, save_model
from rlcore_megatron import MegatronBackend, MegatronConfig
from rlcore_megatron.fit import check_divides, check_sizes
from safetensors.torch import load_file, save_file

from rlcore.errors import ConfigError, ModelError
from rlcore.models.load import read_config
from rlcore.protocols.backend import BackendContext, ModelConfig, OptimizerConfig
from rlcore.registry import versions
from rlcore.testing import run_ranks
from rlcore.testing.training import GENTLE, LENGTHS, column, make_batch, policy_loss, train, whole_weights
from rlcore.testing.waiting import HANG_S


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save_model("qwen3", tmp_path_factory.mktemp("model"))


def tensors_of(backend):
    """Return all tensors of the backend on the device."""
    engine = backend._engine
    own = [parameter for chunk in engine._model.chunks for parameter in chunk.parameters()]
    return [*own, *engine._optimizer.tensors(), *engine._optimizer.gradients()]


@pytest.mark.parametrize("distributed", [True, False])
def test_offload_empties_every_storage_and_training_continues(distributed, path):
    config = {"distributed_optimizer": distributed}
    backend, stayed = make_megatron(path, config=config), another_megatron(path, config=config)
    for one in (backend, stayed):
        train(one, make_batch(), 2)
        one.forward_backward(make_batch(), policy_loss(make_batch()), temperature=0.9)

    expected = whole_weights(backend)
    backend.offload()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in backend.weights()), "weights from host memory"
    left = sum(tensor.untyped_storage().nbytes() for tensor in tensors_of(backend))
    backend.reload()

    assert left == 0
    assert backend.step() == stayed.step(), "gradients are restored"
    expected = whole_weights(stayed)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in backend.weights())


def test_offload_does_not_copy_gradients_between_two_steps(path):
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    backend, stayed = make_megatron(path), another_megatron(path)
    for one in (backend, stayed):
        train(one, make_batch(), 1)
    backend.offload()

    carried = backend._engine._away._storages
    assert {g.untyped_storage()._cdata for g in backend._engine._optimizer.gradients()}.isdisjoint(carried)
    assert RotaryEmbedding.forward.cache_info().currsize == 0, "rotary tables are on the device, too"
    backend.reload()
    assert train(backend, make_batch(), 2) == train(stayed, make_batch(), 2)


def test_using_a_model_in_host_memory_is_refused(path, tmp_path):
    backend, batch = make_megatron(path), make_batch()
    train(backend, batch, 1)
    backend.save(tmp_path)
    backend.offload()

    for what, call in {
        "run": lambda: backend.forward(batch, temperature=1.0),
        "step": backend.step,
        "save": lambda: backend.save(tmp_path),
        "load": lambda: backend.load(tmp_path),
    }.items():
        with pytest.raises(RuntimeError, match=rf"cannot {what} a model that is in host memory\nCall  reload\(\)"):
            call()
    backend.reload()
    train(backend, batch, 1)


def test_the_longest_sample_is_rounded_up():
    from rlcore_megatron.model import Samples

    found = [Samples.of(lengths, "cpu").max_seqlen_q for lengths in ([1], [3, 9], [16, 2], [17], [1000, 7])]

    assert found == [1, 16, 16, 32, 1024]


@pytest.mark.parametrize(
    ("settings", "multiple"),
    [
        ({}, 1),
        ({"tensor_parallel": 4}, 1),
        ({"tensor_parallel": 4, "sequence_parallel": True}, 4),
        ({"fp8": "hybrid"}, 16),
        ({"fp8": "hybrid", "tensor_parallel": 2, "sequence_parallel": True}, 32),
        ({"context_parallel": 2}, 2),
        ({"context_parallel": 2, "tensor_parallel": 4, "sequence_parallel": True}, 8),
    ],
)
def test_micro_batches_are_padded_to_the_required_multiple(settings, multiple):
    assert MegatronConfig(**settings).token_multiple == multiple


def test_padded_tokens_do_not_change_results(path):
    plain, padded = make_megatron(path), another_megatron(path)
    padded._engine._token_multiple = 16

    found, expected = train(padded, make_batch(), 3), train(plain, make_batch(), 3)

    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "precision", "used"),
    [
        ({}, "bfloat16", True),
        ({}, "float32", False),
        ({"layers": "local"}, "bfloat16", False),
    ],
)
def test_transformer_engine_is_used_if_installed_and_in_bfloat16(settings, precision, used, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())

    assert MegatronConfig(**settings).uses_transformer_engine(precision) is used


@pytest.mark.parametrize("settings", [{"layers": "transformer_engine"}, {"fp8": "e4m3"}])
def test_transformer_engine_in_float32_is_refused(settings, path):
    with pytest.raises(ConfigError, match=r"computes in bfloat16, but model.precision=float32\nType  model.precision"):
        planned(path, **settings)


def test_the_memory_estimate_covers_both_precisions():
    def each(config, **about):
        return MegatronBackend.model_bytes(MegatronConfig(**config), 1000, **about) / 1000

    assert each({}, world_size=1, trained=True) == 18  # bfloat16 with all float32 state
    assert each({}, world_size=4, trained=True) == 10  # float32: 4 + 4 + 8 / 4
    assert each({"tensor_parallel": 2}, world_size=4, trained=False) == 2


def test_bfloat16_is_close_to_float32_and_trains_float32_parameters(tmp_path):
    path = save_model("qwen3", tmp_path, initializer_range=0.1)
    exact = make_megatron(path)
    rough = another_megatron(path, precision="bfloat16")

    gap = (
        exact.forward(make_batch(), temperature=1.0).log_probs - rough.forward(make_batch(), temperature=1.0).log_probs
    )
    found, expected = train(rough, make_batch(), 3), train(exact, make_batch(), 3)

    assert 1e-4 < float(gap.abs().max()) < 0.1
    assert [row[0] for row in found] == pytest.approx([row[0] for row in expected], abs=0.05)
    assert {tensor.dtype for _, tensor in rough.weights()} == {torch.bfloat16}
    assert {group["params"][0].dtype for group in rough._engine._optimizer._optimizer.param_groups} == {torch.float32}


def test_policy_reference_and_critic_coexist_in_one_process(path):
    policy = make_megatron(path)
    reference = another_megatron(path, context={"trained": False})
    critic = another_megatron(path, context={"head": "value"})
    start = reference.forward(make_batch(), temperature=1.0).log_probs

    train(policy, make_batch(), 3)
    train(critic, make_batch(), 3)

    assert torch.equal(reference.forward(make_batch(), temperature=1.0).log_probs, start)
    assert float((policy.forward(make_batch(), temperature=1.0).log_probs - start).abs().max()) > 1e-3


def test_a_critic_loads_the_value_head_saved_with_its_model(tmp_path):
    path, batch = save_model("qwen2", tmp_path), make_batch()
    critics = {"context": {"head": "value"}}
    fresh = make_megatron(path, **critics).forward(batch, temperature=1.0).values
    save_file({"value_head.weight": torch.randn(1, 32)}, tmp_path / "value_head.safetensors")

    found = make_megatron(path, **critics).forward(batch, temperature=1.0).values

    expected = make_local(path, **critics).forward(batch, temperature=1.0).values
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
    assert float((found - fresh).abs().max()) > 0.1


@pytest.mark.parametrize("distributed", [True, False])
def test_a_critic_in_bfloat16_trains_a_float32_head(distributed, tmp_path):
    path, config = save_model("qwen3", tmp_path, initializer_range=0.1), {"distributed_optimizer": distributed}
    exact = make_megatron(path, config=config, context={"head": "value"})
    rough = another_megatron(path, config=config, context={"head": "value"}, precision="bfloat16")

    found, expected = train(rough, make_batch(), 3), train(exact, make_batch(), 3)

    assert [row[0] for row in found] == pytest.approx([row[0] for row in expected], rel=0.02)
    assert rough._engine._model.head_weight().dtype == torch.float32
    gap = (rough._engine._model.head_weight() - exact._engine._model.head_weight()).detach()
    assert float(gap.abs().max()) < 1e-3


@pytest.mark.parametrize("head", ["token", "value"])
def test_a_batch_without_rows_or_loss_tokens_gives_zeros_and_changes_no_weights(head, path):
    backend = make_megatron(path, context={"head": head}, optimizer=OptimizerConfig(lr=0.1))
    before = whole_weights(backend)

    for lengths in ([], [0, 0], [2, 1]):
        assert column(backend.forward(make_batch(lengths), temperature=1.0)).tolist() == [0.0] * sum(lengths)
        train(backend, make_batch(lengths), 1)

    assert all(torch.equal(tensor, before[name]) for name, tensor in backend.weights())


def test_the_family_in_the_readme_works_with_only_a_table(tmp_path):
    import transformers

    readme = Path(__file__).parents[1].joinpath("README.md").read_text()
    written = {}
    exec(readme.partition("```python\n")[2].partition("```")[0], written)

    class Mine(CPUMegatron):
        families = written["Mine"].families

    config = transformers.MistralConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        sliding_window=None,
        initializer_range=0.3,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    backend = Mine(MegatronConfig(), model=ModelConfig(path=str(tmp_path)), optimizer=GENTLE, context=BackendContext())

    found = column(backend.forward(make_batch(), temperature=1.0))

    expected = column(make_local(str(tmp_path)).forward(make_batch(), temperature=1.0))
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


def report_of_rank(rank, world, directory, path):
    """Report log messages for a vocabulary of 61, the error for a second grid, and a step with NaN on one rank."""
    logged = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("rlcore_megatron").addHandler(handler)
    make_megatron(path, config={"tensor_parallel": 2}, context={"rank": rank, "world_size": world})
    with pytest.raises(ConfigError) as refused:
        another_megatron(path, config={"pipeline_parallel": 2}, context={"rank": rank, "world_size": world})
    data = make_megatron(path, context={"rank": rank, "world_size": world})
    before = whole_weights(data)

    def bad(out, micro_batch):
        scalar, metrics = policy_loss(make_batch())(out, micro_batch)
        return scalar * (torch.nan if rank == 1 else 1.0), metrics

    data.forward_backward(make_batch().take([rank]), bad, temperature=1.0)
    skipped = data.step()["skipped"].value
    same = all(torch.equal(tensor, before[name]) for name, tensor in data.weights())
    return {"logged": logged, "skipped": skipped, "same": same, "refused": str(refused.value)}


@pytest.fixture(scope="module")
def reports_of_two_ranks(path, tmp_path_factory):
    return run_ranks(2, report_of_rank, tmp_path_factory.mktemp("ranks"), path, preload=PRELOAD)


def test_padding_of_the_vocabulary_is_logged_once(reports_of_two_ranks):
    expected = "vocabulary of 61 padded to 62 for tensor_parallel=2; padding has zero probability and is never saved"
    assert [report["logged"] for report in reports_of_two_ranks] == [[expected], []]


def test_a_nan_gradient_on_one_rank_skips_the_step_on_all(reports_of_two_ranks):
    assert [(report["skipped"], report["same"]) for report in reports_of_two_ranks] == [(1.0, True)] * 2


def test_weights_are_grouped_into_buckets_of_one_type():
    from rlcore_megatron.layout import Entry
    from rlcore_megatron.weights import _buckets

    def entry(name, rows, dtype=torch.float32, together=""):
        expert = 0 if together else None
        return Entry(
            theirs=(name,),
            shape=(rows,),
            dtype=dtype,
            cut=None,
            join="one",
            devices=1,
            expert=expert,
            together=together,
        )

    entries = [entry("a", 2), entry("b", 2), entry("c", 1), entry("d", 9), entry("e", 1), entry("f", 1, torch.bfloat16)]
    entries += [entry("g", 4, together="up"), entry("h", 4, together="up"), entry("i", 4, together="down")]

    buckets = _buckets(entries, 16)

    names = [[one.theirs[0] for one in bucket] for bucket in buckets]
    assert names == [["a", "b"], ["c"], ["d"], ["e"], ["f"], ["g", "h"], ["i"]]


def test_two_grids_in_one_process_are_refused(reports_of_two_ranks):
    expected = (
        "two models of one process need different grids: tensor, pipeline, context and expert sizes (2, 1, 1, 1) and"
        " (1, 2, 1, 1)\n"
        "Set the same backend sizes for all roles of a pool, or type  placement=split"
    )
    assert [report["refused"] for report in reports_of_two_ranks] == [expected] * 2


@pytest.mark.parametrize(
    ("settings", "world_size", "message"),
    [
        (
            {"tensor_parallel": 2, "pipeline_parallel": 2},
            6,
            "6 devices cannot be divided by tensor_parallel 2 · pipeline_parallel 2 = 4\n"
            "Give the pool 4, 8, 12, 16, … devices, or a product of 1, 2, 3, 6:  backend.tensor_parallel=1",
        ),
        (
            {"context_parallel": 4},
            6,
            "6 devices cannot be divided by context_parallel 4 = 4\n"
            "Give the pool 4, 8, 12, 16, … devices, or a product of 1, 2, 3, 6:  backend.context_parallel=1",
        ),
        (
            {"expert_parallel": 4, "pipeline_parallel": 2},
            12,
            "expert_parallel=4 does not divide the 6 devices of a pipeline stage\n"
            "Type  backend.expert_parallel=N  with N one of 1, 2, 3, 6",
        ),
    ],
)
def test_a_grid_that_does_not_fit_is_refused_with_the_sizes_that_do(settings, world_size, message):
    with pytest.raises(ConfigError) as refused:
        check_sizes(MegatronConfig(**settings), world_size)

    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        (
            "qwen3",
            {"tensor_parallel": 4},
            "tensor_parallel=4 does not divide num_key_value_heads=2 of this model\n"
            "Type  backend.tensor_parallel=N  with N one of 1, 2",
        ),
        (
            "qwen3",
            {"context_parallel": 4},
            "context_parallel=4 does not divide num_key_value_heads=2 of a tensor-parallel device\n"
            "Type  backend.context_parallel=N  with N one of 1, 2",
        ),
        (
            "qwen3",
            {"context_parallel": 2, "tensor_parallel": 2},
            "context_parallel=2 does not divide num_key_value_heads=1 of a tensor-parallel device\n"
            "Type  backend.context_parallel=N  with N one of 1",
        ),
        (
            "qwen3",
            {"pipeline_parallel": 3},
            "pipeline_parallel=3 does not divide num_hidden_layers=4 of this model\n"
            "Type  backend.pipeline_parallel=N  with N one of 1, 2, 4",
        ),
        (
            "qwen3",
            {"pipeline_parallel": 2, "virtual_stages": 4},
            "pipeline_parallel · virtual_stages=8 does not divide num_hidden_layers=4 of this model\n"
            "Type  backend.pipeline_parallel=N backend.virtual_stages=M  with a product of 1, 2, 4",
        ),
        (
            "qwen3",
            {"pipeline_parallel": 3, "first_stage_layers": 1},
            "first_stage_layers=1: the other stages (2) cannot split the rest of num_hidden_layers=4 equally\n"
            "Type  backend.first_stage_layers=N  with N one of 2",
        ),
        (
            "qwen3",
            {"pipeline_parallel": 2, "first_stage_layers": 1, "last_stage_layers": 2},
            "first_stage_layers=1 and last_stage_layers=2: the other stages (0) cannot split the rest of"
            " num_hidden_layers=4 equally\nType  backend.first_stage_layers=N  with N one of 2",
        ),
        (
            "qwen3",
            {"pipeline_parallel": 2, "last_stage_layers": 4},
            "last_stage_layers=4: the other stages (1) cannot split the rest of num_hidden_layers=4 equally\n"
            "Type  backend.last_stage_layers=N  with N one of 1, 2, 3",
        ),
        (
            "qwen3",
            {"pipeline_parallel": 8, "last_stage_layers": 1},
            "last_stage_layers=1: the other stages (7) cannot split the rest of num_hidden_layers=4 equally\n"
            "Type  backend.last_stage_layers=0",
        ),
        (
            "qwen3",
            {"expert_parallel": 2},
            "expert_parallel=2, but qwen3 has no experts\nType  backend.expert_parallel=1",
        ),
        (
            "qwen3_moe",
            {"expert_parallel": 3},
            "expert_parallel=3 does not divide num_experts=4 of this model\n"
            "Type  backend.expert_parallel=N  with N one of 1, 2, 4",
        ),
        (
            "qwen3_moe",
            {"tensor_parallel": 2},
            "tensor_parallel=2 of a mixture needs sequence_parallel=true and expert_parallel above 1\n"
            "Type  backend.sequence_parallel=true backend.expert_parallel=2",
        ),
    ],
    ids=[
        "heads",
        "heads of a context",
        "heads of both",
        "layers",
        "virtual layers",
        "first stage",
        "both stages",
        "last stage",
        "too many stages",
        "no experts",
        "experts",
        "experts and tensor",
    ],
)
def test_a_grid_that_does_not_divide_the_model_is_refused_with_the_sizes_that_do(family, settings, message, tmp_path):
    with pytest.raises(ConfigError) as refused:
        check_divides(read_config(Path(save_model(family, tmp_path))), MegatronConfig(**settings))

    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("settings", "start"),
    [
        ({"tensor_parallel": 0}, "tensor_parallel: expected 1 or more, got 0"),
        ({"sequence_parallel": True}, "sequence_parallel=true needs tensor_parallel above 1"),
        ({"virtual_stages": 2}, "virtual_stages=2 needs pipeline_parallel above 1"),
        ({"first_stage_layers": 2}, "first_stage_layers=2 needs pipeline_parallel above 1 and virtual_stages=1"),
        (
            {"last_stage_layers": 2, "pipeline_parallel": 2, "virtual_stages": 2},
            "last_stage_layers=2 needs pipeline_parallel above 1 and virtual_stages=1",
        ),
        ({"fp8": "hybrid", "layers": "local"}, "fp8=hybrid needs the layers of Transformer Engine, but layers=local"),
        ({"context_parallel": 0}, "context_parallel: expected 1 or more, got 0"),
        ({"lora_rank": 8}, "lora_rank=8: megatron-core has no adapters"),
    ],
)
def test_contradictory_settings_are_refused(settings, start):
    with pytest.raises(ConfigError) as refused:
        MegatronConfig(**settings)

    assert str(refused.value).startswith(start)
    assert "\nType  " in str(refused.value)


@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None, reason="Transformer Engine is installed"
)
@pytest.mark.parametrize(
    ("settings", "named"),
    [({"layers": "transformer_engine"}, "layers=transformer_engine"), ({"fp8": "e4m3"}, "fp8=e4m3")],
)
@pytest.mark.parametrize("when", ["planned", "made"])
def test_options_that_need_transformer_engine_are_refused_without_it(settings, named, when, path):
    half = {"precision": "bfloat16"}

    with pytest.raises(ConfigError) as refused:
        planned(path, **half, **settings) if when == "planned" else make_megatron(path, config=settings, **half)

    first, second = str(refused.value).splitlines()
    assert first == f"backend=megatron with {named} needs Transformer Engine, which is not installed"
    assert second.startswith("Type  pip install --no-build-isolation 'transformer-engine[pytorch]'")


def planned(path, *, device="cuda", world_size=8, precision="float32", **settings):
    """Return the number of data-parallel ranks, or raise what a plan raises."""
    return MegatronBackend.data_parallel(
        MegatronConfig(**settings),
        model=ModelConfig(path=path, precision=precision),
        world_size=world_size,
        device=device,
    )


def test_plan_counts_the_data_parallel_ranks(path):
    assert planned(path) == 8
    assert planned(path, tensor_parallel=2) == 4
    assert planned(path, tensor_parallel=2, pipeline_parallel=4) == 1
    assert planned(path, context_parallel=2, pipeline_parallel=2) == 2


@pytest.mark.parametrize(
    ("given", "first"),
    [
        ({"device": "cpu"}, "backend=megatron needs CUDA devices"),
        ({"world_size": 6, "pipeline_parallel": 4}, "6 devices cannot be divided by pipeline_parallel 4 = 4"),
        ({"world_size": 6, "pipeline_parallel": 3}, "pipeline_parallel=3 does not divide num_hidden_layers=4"),
        ({"expert_parallel": 2}, "expert_parallel=2, but qwen3 has no experts"),
    ],
    ids=["no cuda", "devices", "layers", "experts"],
)
def test_settings_that_cannot_run_are_refused_before_anything_starts(given, first, path):
    with pytest.raises(ConfigError, match=first):
        planned(path, **given)


def test_a_family_without_a_table_is_refused_before_anything_starts(tmp_path):
    path = Path(save_model("llama", tmp_path))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": "gemma"}))

    with pytest.raises(ModelError, match="has model_type 'gemma', but backend=megatron has tables only for llama"):
        planned(str(path))


def test_a_plan_does_not_import_megatron_core(path):
    program = (
        "import sys\nfrom rlcore.protocols.backend import ModelConfig\nfrom rlcore_megatron import *\n"
        f"model = ModelConfig(path={path!r})\n"
        "MegatronBackend.data_parallel(MegatronConfig(), model=model, world_size=2, device='cuda')\n"
        "assert 'megatron' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=HANG_S)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_error_without_cuda_names_the_backends_to_use(path):
    with pytest.raises(ConfigError) as refused:
        MegatronBackend(MegatronConfig(), model=ModelConfig(path=path), optimizer=GENTLE, context=BackendContext())

    first, second = str(refused.value).splitlines()
    assert first.startswith(
        "backend=megatron needs CUDA devices: megatron-core, its distributed optimizer and Transformer"
    )
    assert second == "Type  backend=fsdp  or  backend=local"


@pytest.mark.parametrize(
    ("installed", "first", "second"),
    [
        (
            "",
            "backend=megatron needs megatron-core<0.17,>=0.16.1, which is not installed",
            "Type  pip install 'rlcore-megatron'",
        ),
        (
            "0.13.0",
            "backend=megatron was written for megatron-core<0.17,>=0.16.1, and megatron-core 0.13.0 is installed",
            "Type  pip install 'megatron-core<0.17,>=0.16.1'",
        ),
    ],
)
def test_megatron_core_missing_or_of_another_version_is_refused(installed, first, second, path, monkeypatch):
    real = versions.installed_version
    monkeypatch.setattr(
        versions, "installed_version", lambda name: installed if name == "megatron-core" else real(name)
    )

    with pytest.raises(ConfigError) as refused:
        make_megatron(path)

    assert str(refused.value).splitlines() == [first, second]


@pytest.mark.parametrize(
    ("rope", "what"),
    [
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "rope_type=dynamic"),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}, "rope_type=yarn with attention_factor=1.139"),
        ({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ],
    ids=["dynamic", "yarn", "partial"],
)
def test_positions_that_megatron_core_does_not_support_are_refused(rope, what, tmp_path):
    path = Path(save_model("llama", tmp_path))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"rope_parameters": rope}))

    with pytest.raises(ModelError, match=f"has {what}"):
        make_megatron(str(path))


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        ("missing", r"lacks 1 tensors, the first is model\.norm\.weight"),
        ("garbage", "has a damaged file"),
        (
            "more",
            r"has 1 tensors that are not in the table of its family, the first is model\.layers\.0\.extra\.weight",
        ),
        ("shape", r"has shape \[61, 32\] instead of \[70, 32\]"),
        ("fewer layers", r"holds 11 weights that do not fit its config.json, the first is model\.layers\.3\."),
        ("not finite", r"model\.layers\.1\.mlp\.down_proj\.weight has 1 values that are not finite\nCopy the whole"),
    ],
)
def test_a_damaged_model_directory_is_refused(damage, text, path, tmp_path):
    broken = Path(shutil.copytree(path, tmp_path / "broken"))
    file = broken / "model.safetensors"
    if damage == "missing":
        weights = load_file(file)
        del weights["model.norm.weight"]
        save_file(weights, file)
    elif damage == "more":
        save_file(load_file(file) | {"model.layers.0.extra.weight": torch.zeros(2)}, file)
    elif damage == "garbage":
        file.write_bytes(b"\xff" * 1000)
    elif damage == "fewer layers":
        config = json.loads((broken / "config.json").read_text())
        changed = {**config, "num_hidden_layers": 3, "layer_types": config["layer_types"][:3]}
        (broken / "config.json").write_text(json.dumps(changed))
    elif damage == "not finite":
        weights = load_file(file)
        weights["model.layers.1.mlp.down_proj.weight"][3, 2] = float("nan")
        save_file(weights, file)
    else:
        config = (broken / "config.json").read_text()
        (broken / "config.json").write_text(config.replace('"vocab_size": 61', '"vocab_size": 70'))

    with pytest.raises(ModelError, match=text):
        make_megatron(str(broken))


def test_a_packed_sample_does_not_depend_on_its_neighbors(path):
    backend, batch = make_megatron(path), make_batch()

    together = backend.forward(batch, temperature=1.0).log_probs.split(LENGTHS)

    for row in range(len(LENGTHS)):
        alone = backend.forward(batch.take([row]), temperature=1.0).log_probs
        torch.testing.assert_close(alone, together[row], atol=2e-5, rtol=0)
