"""Checkpoints: resumed on two ranks exactly and on one and four, written in the background, refused when damaged."""

import json
import shutil
import warnings

import pytest
import torch
from fsdp_cases import PRELOAD, fsdp_weights, make_fsdp, make_local
from rlcore_fsdp import FSDPBackend, FSDPConfig
from safetensors.torch import load_file, save_file

from rlcore.errors import ConfigError, ModelError
from rlcore.models.load import load_model
from rlcore.protocols.backend import ModelConfig
from rlcore.testing import run_ranks
from rlcore.testing.training import LENGTHS, make_batch, save_model, train

STEPS = 3
KINDS = {
    "dense": {},
    "tensor": {"tensor_parallel": 2},
    "adapters": {"lora_rank": 2},
    "tensor-adapters": {"tensor_parallel": 2, "lora_rank": 2},
    "muon": {"optimizer": "muon"},
}


def shares(dp_rank, dp_size):
    return list(range(dp_rank, len(LENGTHS), dp_size))


def write_and_go_on(rank, world, directory, path):
    """Train, save, train; the checkpoint is written while the last steps run."""
    batch, report = make_batch(), {}
    for kind, config in KINDS.items():
        backend = make_fsdp(path, config=config, context={"rank": rank, "world_size": world, "seed": 3})
        share = shares(backend.mesh.dp_rank, backend.mesh.dp_size)
        train(backend, batch, STEPS, share=share)
        target = directory / kind
        if rank == 0:
            target.mkdir()
        torch.distributed.barrier()
        saving = backend.save_async(target)
        complete_at_once = (target / "backend.json").exists()
        after = train(backend, batch, STEPS, share=share)
        saving.finish()
        torch.distributed.barrier()
        weights = fsdp_weights(backend)
        if rank == 0:
            save_file({k: v.contiguous() for k, v in weights.items()}, directory / f"{kind}.safetensors")
        report[kind] = {"after": after, "complete_at_once": complete_at_once}
    return report


def read_and_go_on(rank, world, directory, path, source, kinds):
    """Load a checkpoint of another world size into a new backend and continue training."""
    batch, report = make_batch(), {}
    for kind in kinds:
        config = KINDS[kind] if world > 1 else {k: v for k, v in KINDS[kind].items() if k != "tensor_parallel"}
        backend = make_fsdp(path, config=config, context={"rank": rank, "world_size": world, "seed": 9})
        backend.load(source / kind)
        share = shares(backend.mesh.dp_rank, backend.mesh.dp_size)
        report[kind] = {"after": train(backend, batch, STEPS, share=share), "returns": backend.mesh.returns}
        weights = fsdp_weights(backend)
        if rank == 0:
            save_file({k: v.contiguous() for k, v in weights.items()}, directory / f"{kind}.safetensors")
    return report


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save_model("qwen3", tmp_path_factory.mktemp("model"), initializer_range=0.2)


@pytest.fixture(scope="module")
def written(path, tmp_path_factory):
    """Reports of two ranks, and a directory with one checkpoint of each kind."""
    directory = tmp_path_factory.mktemp("written")
    return run_ranks(2, write_and_go_on, directory, path, preload=PRELOAD, timeout_s=300), directory


@pytest.fixture(scope="module")
def resumed(path, written, tmp_path_factory):
    made = {}

    def run(world):
        if world not in made:
            directory = tmp_path_factory.mktemp(f"resumed{world}")
            made[world] = (
                run_ranks(
                    world, read_and_go_on, directory, path, written[1], list(KINDS), preload=PRELOAD, timeout_s=300
                ),
                directory,
            )
        return made[world]

    return run


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_number_of_ranks_resumes_bit_for_bit(kind, written, resumed):
    reports, directory = resumed(2)

    for rank in range(2):
        assert reports[rank][kind]["after"] == written[0][rank][kind]["after"]
    expected = load_file(written[1] / f"{kind}.safetensors")
    found = load_file(directory / f"{kind}.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_another_number_of_ranks_resumes_with_close_results(kind, world, written, resumed):
    tolerance = 5e-3 if kind == "muon" else 2e-5  # Muon orthogonalizes in bfloat16
    reports, directory = resumed(world)

    losses = torch.tensor([[row[0] for row in r[kind]["after"]] for r in reports if r[kind]["returns"]]).sum(0)
    per_rank = [[row[0] for row in report[kind]["after"]] for report in written[0]]
    expected = torch.tensor(per_rank[:1] if kind.startswith("tensor") else per_rank).sum(0)
    torch.testing.assert_close(losses, expected, atol=tolerance, rtol=1e-5)
    weights = load_file(written[1] / f"{kind}.safetensors")
    found = load_file(directory / f"{kind}.safetensors")
    for name, tensor in weights.items():
        torch.testing.assert_close(found[name], tensor, atol=tolerance, rtol=0)


def test_a_checkpoint_is_incomplete_until_every_rank_has_written(written):
    reports, directory = written

    assert [report["dense"]["complete_at_once"] for report in reports] == [False, False]
    state = json.loads((directory / "dense" / "backend.json").read_text())
    assert len(state["files"]) == 2
    assert state["num_steps"] == STEPS
    suffixes = {path.suffix for path in (directory / "dense").rglob("*") if path.is_file()}
    assert suffixes == {".json", ".safetensors"}


def test_a_checkpoint_of_adapters_contains_adapters_only(written):
    state = json.loads((written[1] / "adapters" / "backend.json").read_text())

    assert state["tensors"]
    assert all(".lora_" in name for name in state["tensors"])


@pytest.fixture
def backend(path):
    return make_fsdp(path)


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe", "glm4_moe"])
def test_an_exported_model_has_the_same_logits(family, tmp_path):
    path, target = save_model(family, tmp_path / "model"), tmp_path / "exported"
    backend, batch = make_fsdp(path), make_batch([9])
    train(backend, batch, 2)
    expected = backend.forward(batch, temperature=1.0).log_probs
    (tmp_path / "checkpoint").mkdir()
    backend.save(tmp_path / "checkpoint")
    target.mkdir()

    type(backend).export(tmp_path / "checkpoint", target)

    logits = load_model(str(target))(batch["input_ids"][None]).logits[0, :-1].detach()
    found = logits.log_softmax(-1).gather(-1, batch["input_ids"][1:, None]).squeeze(-1)
    torch.testing.assert_close(found[1:], expected[2:], atol=1e-5, rtol=1e-5)
    before = load_model(path)(batch["input_ids"][None]).logits[0, :-1].detach()
    assert float((before - logits).abs().max()) > 1e-3


@pytest.mark.parametrize("config", [{}, {"lora_rank": 2}], ids=["dense", "adapters"])
def test_an_exported_critic_has_the_same_values(config, path, tmp_path):
    critic, context = make_fsdp(path, config=config, context={"head": "value"}), {"head": "value", "seed": 1}
    train(critic, make_batch(), 2)
    checkpoint, target = tmp_path / "checkpoint", tmp_path / "exported"
    checkpoint.mkdir()
    target.mkdir()
    critic.save(checkpoint)

    type(critic).export(checkpoint, target)

    found, expected = make_local(str(target), context=context), critic
    values = [one.forward(make_batch(), temperature=1.0).values for one in (found, expected)]
    torch.testing.assert_close(*values, atol=2e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])  # gemma2 has no sdpa
@pytest.mark.parametrize("rslora", [False, True])
def test_export_writes_the_merged_model_and_adapters_for_peft(family, rslora, tmp_path):
    peft = pytest.importorskip("peft")
    path = save_model(family, tmp_path / "model")
    config = {"lora_rank": 2, "lora_alpha": 6.0, "lora_rslora": rslora}
    backend, batch = make_fsdp(path, config=config), make_batch([9])
    train(backend, batch, 4)
    merged = dict(backend.weights())
    checkpoint, target = tmp_path / "checkpoint", tmp_path / "exported"
    checkpoint.mkdir()
    target.mkdir()
    backend.save(checkpoint)

    type(backend).export(checkpoint, target)

    found = dict(load_model(str(target)).named_parameters())
    for name, tensor in merged.items():
        torch.testing.assert_close(found[name].detach(), tensor, atol=1e-6, rtol=0)
    whole = load_model(str(target))(batch["input_ids"][None]).logits
    with_adapter = peft.PeftModel.from_pretrained(load_model(path), target / "adapter")
    torch.testing.assert_close(with_adapter(batch["input_ids"][None]).logits, whole, atol=1e-4, rtol=1e-4)
    again = make_fsdp(path, config=config | {"lora_path": str(target / "adapter")})
    for name, tensor in again.weights():
        assert torch.equal(tensor, merged[name]), name


@pytest.fixture
def adapters(path, tmp_path):
    """Adapters of the model at `path`, of rank 2, alpha 4 and two targets, written by peft itself."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)  # peft asks for it
        peft.get_peft_model(load_model(path), config).save_pretrained(tmp_path / "adapters")
    return tmp_path / "adapters"


OF_ADAPTERS = {"lora_rank": 2, "lora_alpha": 4.0, "lora_targets": ("q_proj", "up_proj")}


@pytest.mark.parametrize(
    "other",
    [{"lora_rank": 4}, {"lora_alpha": 2.0}, {"lora_rslora": True}, {"lora_targets": ("q_proj",)}],
    ids=str,
)
def test_adapters_of_other_settings_are_refused_with_the_settings(other, path, adapters):
    config = FSDPConfig(**OF_ADAPTERS | other, lora_path=str(adapters))
    line = r"\nType  backend.lora_rank=2 backend.lora_alpha=4 backend.lora_targets=\[q_proj,up_proj\]$"

    with pytest.raises(ConfigError, match=r"adapters of other settings, or of another model" + line):
        FSDPBackend.data_parallel(config, model=ModelConfig(path=path), world_size=1, device="cpu")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda it: (it / "adapter_model.safetensors").unlink(), "has no adapter_model.safetensors\n"),
        (lambda it: (it / "adapter_config.json").write_text("{"), "cannot be read: JSONDecodeError"),
        (lambda it: (it / "adapter_model.safetensors").write_bytes(b"x" * 99), "cannot be read: SafetensorError"),
        (
            lambda it: (it / "adapter_config.json").write_text('{"r": 2, "lora_alpha": 4, "use_dora": true}'),
            "adapters with use_dora are not supported\n",
        ),
        (
            lambda it: (it / "adapter_config.json").write_text(
                '{"r": 2, "lora_alpha": 4, "init_lora_weights": "pissa_niter_4"}'
            ),
            "adapters with init_lora_weights=pissa_niter_4 are not supported\n",
        ),
    ],
)
def test_adapters_that_cannot_be_used_are_refused_before_the_start(damage, message, path, adapters):
    damage(adapters)
    config = FSDPConfig(**OF_ADAPTERS, lora_path=str(adapters))

    with pytest.raises(ModelError, match=message):
        FSDPBackend.data_parallel(config, model=ModelConfig(path=path), world_size=1, device="cpu")


def test_adapters_of_a_model_of_another_size_are_refused(adapters, tmp_path):
    other = save_model("qwen3", tmp_path / "other", hidden_size=48)

    with pytest.raises(ModelError, match=r"has shape \[.*, but the model needs .*\nGive the model"):
        make_fsdp(other, config=OF_ADAPTERS | {"lora_path": str(adapters)})


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(backend, tmp_path):
    other = make_fsdp(save_model("qwen3", tmp_path / "other", hidden_size=48))
    train(backend, make_batch(), 1)
    (tmp_path / "checkpoint").mkdir()
    backend.save(tmp_path / "checkpoint")
    before = {name: tensor.clone() for name, tensor in other.weights()}

    with pytest.raises(ModelError, match=r"another model.*\d+ parameters differ, the first is model\.") as refused:
        other.load(tmp_path / "checkpoint")

    assert "Nothing was loaded" in str(refused.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.weights())


@pytest.mark.parametrize("other", ["alpha", "base", "moved"])
def test_adapters_of_another_base_model_or_alpha_are_refused(other, path, tmp_path):
    config, options = {"lora_rank": 2, "lora_alpha": 2.0}, {}
    backend, checkpoint = make_fsdp(path, config=config), tmp_path / "checkpoint"
    train(backend, make_batch(), 1)
    checkpoint.mkdir()
    backend.save(checkpoint)
    if other == "alpha":
        options, message = {"lora_alpha": 8.0}, r"adapters with lora_alpha=2 and not 8"
    elif other == "base":
        path, message = save_model("qwen3", tmp_path / "other"), r"adapters for the weights in .*other has others"
    else:
        path = str(shutil.copytree(path, tmp_path / "moved"))
    reader = make_fsdp(path, config=config | options, context={"seed": 5})
    before = {name: tensor.clone() for name, tensor in reader.weights()}

    if other == "moved":
        reader.load(checkpoint)
        expected = dict(backend.weights())
        assert all(torch.equal(tensor, expected[name]) for name, tensor in reader.weights())
        return
    with pytest.raises(ModelError, match=message):
        reader.load(checkpoint)
    assert all(torch.equal(tensor, before[name]) for name, tensor in reader.weights())


def test_a_checkpoint_of_another_class_is_refused(backend, tmp_path):
    other = make_fsdp(save_model("qwen2", tmp_path / "other"))
    (tmp_path / "checkpoint").mkdir()
    backend.save(tmp_path / "checkpoint")

    with pytest.raises(ModelError, match="of another model, Qwen3ForCausalLM and not Qwen2ForCausalLM"):
        other.load(tmp_path / "checkpoint")


@pytest.mark.parametrize("damage", ["missing", "cut off", "no state", "garbage"])
def test_a_damaged_checkpoint_is_refused_with_the_file_and_changes_nothing(damage, written, path, tmp_path, backend):
    directory = tmp_path / "checkpoint"
    shutil.copytree(written[1] / "dense", directory)
    shard = sorted((directory / "shards").iterdir())[-1]
    if damage == "missing":
        shard.unlink()
    elif damage == "cut off":
        shard.write_bytes(shard.read_bytes()[:-7])
    elif damage == "no state":
        (directory / "backend.json").unlink()
    else:
        shard.write_bytes(b"\xff" * shard.stat().st_size)
    before = {name: tensor.clone() for name, tensor in backend.weights()}
    named = {"no state": "backend.json", "garbage": "cannot be read"}.get(damage, shard.name)

    with pytest.raises(ModelError, match=named):
        backend.load(directory)

    assert all(torch.equal(tensor, before[name]) for name, tensor in backend.weights())
    assert backend.num_steps == 0
