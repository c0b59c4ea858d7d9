"""Checkpoints: resumed exactly on the same grid, closely on others, refused when damaged, exported for transformers."""

import json
import shutil
from itertools import pairwise

import pytest
import torch
from megatron_cases import PRELOAD, another_megatron, make_local, make_megatron, save_model
from rlcore_megatron import MegatronBackend
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rlcore.errors import ModelError
from rlcore.models.load import load_model
from rlcore.testing import run_ranks
from rlcore.testing.training import LENGTHS, make_batch, train, whole_weights

STEPS = 3
PLAIN = {"distributed_optimizer": False}
GRIDS = {
    # name: (world size, settings of the backend, fields of the model or the context)
    "tensor": (2, {"tensor_parallel": 2}, {}),
    "pipeline": (2, {"pipeline_parallel": 2}, {}),
    "uneven": (2, {"pipeline_parallel": 2, "last_stage_layers": 1}, {}),
    "data": (2, {}, {}),
    "plain": (2, {"tensor_parallel": 2, **PLAIN}, {}),
    "both": (4, {"tensor_parallel": 2, "pipeline_parallel": 2}, {}),
    "tensor-and-data": (4, {"tensor_parallel": 2}, {}),
    "context": (2, {"context_parallel": 2}, {}),
    "context-and-data": (4, {"context_parallel": 2}, {}),
    "one": (1, {}, {}),
    "half": (2, {"tensor_parallel": 2}, {"precision": "bfloat16"}),
    "critic": (2, {"pipeline_parallel": 2}, {"head": "value"}),  # its stages have different numbers of parameters
    "experts": (2, {"expert_parallel": 2}, {"family": "qwen3_moe"}),
    "experts-pipeline": (2, {"pipeline_parallel": 2}, {"family": "qwen3_moe"}),
    "experts-alone": (1, {}, {"family": "qwen3_moe"}),
}


WRITTEN = ["tensor", "plain", "half", "critic", "experts", "context"]
"""Grids of two ranks that write checkpoints."""


def shares(dp_size):
    size = len(LENGTHS) // dp_size
    return [list(range(a, b)) for a, b in pairwise(range(0, len(LENGTHS) + 1, size))]


def make(grid, paths, rank, seed):
    world, config, given = GRIDS[grid]
    context = {"rank": rank, "world_size": world, "seed": seed, "head": given.get("head", "token")}
    model = {name: value for name, value in given.items() if name not in ("head", "family")}
    return make_megatron(paths[given.get("family", "qwen2")], config=config, context=context, **model)


def go_on(backend, directory, name):
    """Train, save the weights, and return the losses of this rank."""
    share = shares(backend.mesh.dp_size)[backend.mesh.dp_rank]
    after = train(backend, make_batch(), STEPS, share=share)
    weights = whole_weights(backend)
    if backend.mesh.rank == 0:
        save_file({key: value.contiguous() for key, value in weights.items()}, directory / f"{name}.safetensors")
    return {"after": after, "returns": backend.mesh.returns}


def write(rank, world, directory, paths, grids):
    """Train, save and continue training, for each grid."""
    report = {}
    for grid in grids:
        backend = make(grid, paths, rank, seed=3)
        train(backend, make_batch(), STEPS, share=shares(backend.mesh.dp_size)[backend.mesh.dp_rank])
        target = directory / grid
        if rank == 0:
            target.mkdir()
        torch.distributed.barrier()
        saving = backend.save_async(target)
        complete_at_once = (target / "backend.json").exists()
        report[grid] = go_on(backend, directory, f"after-{grid}")  # while the checkpoint is written
        saving.finish()
        assert not complete_at_once and (target / "backend.json").is_file()
    return report


def read(rank, world, directory, paths, pairs, source):
    """Load into a new backend and continue training, for each (grid that wrote, grid that reads)."""
    report = {}
    for written, grid in pairs:
        backend = make(grid, paths, rank, seed=9)
        backend.load(source / written)
        report[f"{written}-{grid}"] = go_on(backend, directory, f"{written}-{grid}")
    return report


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Model paths; qwen2 has tied embeddings, biases, and a vocabulary that two devices must pad."""
    root = tmp_path_factory.mktemp("models")
    return {family: save_model(family, root / family, initializer_range=0.2) for family in ("qwen2", "qwen3_moe")}


@pytest.fixture(scope="module")
def path(paths):
    return paths["qwen2"]


@pytest.fixture(scope="module")
def written(paths, tmp_path_factory):
    """Reports of the ranks by grid, and a directory with one checkpoint of each grid."""
    directory, reports = tmp_path_factory.mktemp("written"), {}
    for world, grids in ((2, WRITTEN), (4, ["tensor-and-data"])):
        found = run_ranks(world, write, directory, paths, grids, preload=PRELOAD, timeout_s=300)
        (directory / "rendezvous").unlink(missing_ok=True)
        reports |= {grid: [one[grid] for one in found] for grid in grids}
    return reports, directory


PAIRS = {
    2: [
        ("tensor", "tensor"),
        ("plain", "plain"),
        ("half", "half"),
        ("critic", "critic"),
        ("tensor", "pipeline"),
        ("tensor", "uneven"),
        ("tensor", "data"),
        ("plain", "pipeline"),
        ("tensor", "plain"),
        ("tensor-and-data", "data"),
        ("context", "context"),
        ("context", "tensor"),
        ("experts", "experts"),
        ("experts", "experts-pipeline"),
    ],
    4: [
        ("tensor-and-data", "tensor-and-data"),
        ("tensor", "both"),
        ("tensor-and-data", "both"),
        ("context", "both"),
        ("tensor", "context-and-data"),
    ],
}


@pytest.fixture(scope="module")
def resumed(paths, written, tmp_path_factory):
    made = {}

    def run(world):
        if world not in made:
            directory = tmp_path_factory.mktemp(f"resumed{world}")
            found = run_ranks(world, read, directory, paths, PAIRS[world], written[1], preload=PRELOAD, timeout_s=300)
            made[world] = found, directory
        return made[world]

    return run


@pytest.mark.parametrize("grid", [*WRITTEN, "tensor-and-data"])
def test_the_same_grid_resumes_bit_for_bit(grid, written, resumed):
    reports, directory = resumed(GRIDS[grid][0])

    assert [one[f"{grid}-{grid}"] for one in reports] == written[0][grid]
    expected = load_file(written[1] / f"after-{grid}.safetensors")
    found = load_file(directory / f"{grid}-{grid}.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("written_by", "read_by"), [pair for pairs in PAIRS.values() for pair in pairs if pair[0] != pair[1]]
)
def test_another_grid_resumes_with_the_same_losses(written_by, read_by, written, resumed):
    reports, directory = resumed(GRIDS[read_by][0])

    def losses(reports):
        return torch.tensor([[row[0] for row in one["after"]] for one in reports if one["returns"]]).sum(0)

    found = [one[f"{written_by}-{read_by}"] for one in reports]
    torch.testing.assert_close(losses(found), losses(written[0][written_by]), atol=5e-6, rtol=1e-5)
    expected = load_file(written[1] / f"after-{written_by}.safetensors")
    weights = load_file(directory / f"{written_by}-{read_by}.safetensors")
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, atol=2e-5, rtol=0)


@pytest.mark.parametrize("written_by", ["tensor", "context"])
def test_one_process_resumes_with_the_same_losses(written_by, paths, written):
    backend = make("one", paths, 0, seed=9)
    backend.load(written[1] / written_by)

    history = train(backend, make_batch(), STEPS)

    expected = [row[0] for row in written[0][written_by][0]["after"]]
    assert [row[0] for row in history] == pytest.approx(expected, abs=5e-6)


@pytest.mark.parametrize(("written_by", "read_by"), [("tensor", "one"), ("experts", "experts-alone")])
def test_transformers_loads_an_exported_model(written_by, read_by, paths, written, tmp_path):
    backend = make(read_by, paths, 0, seed=9)
    backend.load(written[1] / written_by)

    MegatronBackend.export(written[1] / written_by, tmp_path)

    exported = dict(load_model(str(tmp_path)).named_parameters())
    weights = whole_weights(backend)
    assert exported.keys() == weights.keys()
    assert all(torch.equal(tensor, exported[name].detach()) for name, tensor in weights.items())


def test_an_export_of_several_files_has_an_index(written, tmp_path, monkeypatch):
    from rlcore_megatron import checkpoint

    monkeypatch.setattr(checkpoint, "_FILE_BYTES", 10_000)
    MegatronBackend.export(written[1] / "tensor", tmp_path)

    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 3
    assert len(list(load_model(str(tmp_path)).parameters())) == len(index["weight_map"])


def test_a_critic_keeps_its_value_head(path, tmp_path):
    context = {"head": "value", "seed": 3}
    critic = make_megatron(path, context=context)
    train(critic, make_batch(), 2)
    critic.save(tmp_path)
    resumed = another_megatron(path, context=context | {"seed": 5})
    resumed.load(tmp_path)

    values = [one.forward(make_batch(), temperature=1.0).values for one in (critic, resumed)]

    assert torch.equal(*values)
    assert "value_head.weight" in str(load_file(tmp_path / "shards" / "rank-00000.safetensors").keys())


@pytest.mark.parametrize("family", ["qwen2", "qwen3"], ids=["tied", "untied"])
def test_an_exported_critic_is_a_complete_model_with_its_head(family, tmp_path):
    path, context = save_model(family, tmp_path / "model"), {"head": "value"}
    critic, saved, target = make_megatron(path, context=context), tmp_path / "saved", tmp_path / "exported"
    train(critic, make_batch(), 2)
    saved.mkdir()
    target.mkdir()
    critic.save(saved)

    MegatronBackend.export(saved, target)

    found = make_local(str(target), context=context | {"seed": 5})
    values = [one.forward(make_batch(), temperature=1.0).values for one in (found, critic)]
    torch.testing.assert_close(*values, atol=2e-5, rtol=1e-5)
    if family == "qwen3":
        expected = load_model(path).lm_head.weight
        assert torch.equal(load_model(str(target)).lm_head.weight, expected)
        shutil.rmtree(path)
        with pytest.raises(ModelError, match=r"there is no such directory"):
            MegatronBackend.export(saved, target)


def test_config_of_an_export_has_dtype_float32(tmp_path):
    path = save_model("qwen3", tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace('"dtype": "float32"', '"dtype": "bfloat16"'))
    backend, saved, target = make_megatron(path), tmp_path / "saved", tmp_path / "exported"
    train(backend, make_batch(), 1)
    saved.mkdir()
    target.mkdir()
    backend.save(saved)
    assert json.loads((saved / "config.json").read_text())["dtype"] == "bfloat16"

    MegatronBackend.export(saved, target)

    exported = dict(AutoModelForCausalLM.from_pretrained(target, local_files_only=True).named_parameters())
    assert all(torch.equal(exported[name], weight) for name, weight in backend.weights())


def test_a_checkpoint_before_the_first_step_has_no_moments(path, tmp_path):
    backend = make_megatron(path)
    backend.save(tmp_path)
    resumed = another_megatron(path)
    train(resumed, make_batch(), 2)
    resumed.load(tmp_path)

    assert train(resumed, make_batch(), 2) == train(backend, make_batch(), 2)


def test_a_checkpoint_of_other_layers_is_refused(path, written, tmp_path):
    other = make_megatron(save_model("qwen2", tmp_path / "other", num_hidden_layers=2))
    before = whole_weights(other)

    with pytest.raises(ModelError, match=r"of another model: num_hidden_layers is 4 there and 2 here\nUse the model"):
        other.load(written[1] / "tensor")

    assert all(torch.equal(tensor, before[name]) for name, tensor in other.weights())


@pytest.mark.parametrize("damage", ["missing", "cut off", "no state", "garbage", "a tensor less"])
def test_a_damaged_checkpoint_is_refused_with_the_file_and_changes_nothing(damage, written, paths, tmp_path):
    backend = make("one", paths, 0, seed=9)
    directory = shutil.copytree(written[1] / "tensor", tmp_path / "checkpoint")
    shard = sorted((directory / "shards").iterdir())[-1]
    if damage == "missing":
        shard.unlink()
    elif damage == "cut off":
        shard.write_bytes(shard.read_bytes()[:-7])
    elif damage == "no state":
        (directory / "backend.json").unlink()
    elif damage == "garbage":
        shard.write_bytes(b"\xff" * shard.stat().st_size)
    else:
        state = json.loads((directory / "backend.json").read_text())
        del state["files"][shard.name]
        (directory / "backend.json").write_text(json.dumps(state))
    before = whole_weights(backend)
    named = {"no state": "backend.json", "garbage": "damaged file", "a tensor less": "a part of it"}

    with pytest.raises(ModelError, match=named.get(damage, shard.name)):
        backend.load(directory)

    assert all(torch.equal(tensor, before[name]) for name, tensor in backend.weights())
    assert backend.num_steps == 0
