"""Losses, gradient norms and weights after ten steps equal those of `local`, on every grid of one, two and four processes.

Tolerances: sums over ranks and shards are added in another order than in one process, which in float32 changes the last
bit or two (6e-8 relative each) of every step; ten steps of an optimiser that divides by nothing smaller than 1e-2 let that
grow by less than a hundred. A lost or doubled gradient is off by 1e-2 at least.
"""

from itertools import pairwise

import pytest
import torch
from fsdp_cases import (
    LENGTHS,
    PRELOAD,
    fsdp_weights,
    local_weights,
    make_batch,
    make_fsdp,
    make_local,
    save_model,
    train,
)
from safetensors.torch import load_file, save_file

from rlcore.testing import run_ranks

STEPS = 10
LOSS_TOLERANCE = 5e-6
WEIGHT_TOLERANCE = 2e-5

CASES = {
    # name: (world sizes, model, settings of the backend, fields of the context and the model)
    "sharded": ((1, 2, 4), "stories", {}, {}),
    "hybrid": ((4,), "stories", {"replicate": 2}, {}),
    "replicated": ((2,), "qwen3", {"replicate": 2}, {}),
    "untied": ((1, 2, 4), "qwen2", {}, {}),
    "tensor": ((2,), "qwen3", {"tensor_parallel": 2}, {}),
    "tensor-and-sharded": ((4,), "qwen3", {"tensor_parallel": 2}, {}),
    "tensor-tied": ((4,), "stories", {"tensor_parallel": 2}, {}),
    "tensor-and-hybrid": ((4,), "qwen2", {"tensor_parallel": 2, "replicate": 2}, {}),
    "context": ((2, 4), "stories", {"context_parallel": 2}, {}),
    "context-of-four": ((4,), "stories", {"context_parallel": 4}, {}),
    "softcaps": ((2,), "gemma2", {}, {}),
    "two-rotations": ((2,), "gemma3", {}, {}),
    "experts": ((2, 4), "qwen3_moe", {}, {}),
    "mixtral": ((2,), "mixtral", {}, {}),
    "critic": ((1, 2, 4), "qwen2", {}, {"head": "value"}),
    "critic-context": ((2,), "qwen2", {"context_parallel": 2}, {"head": "value"}),
    "adapters": ((1, 2, 4), "stories", {"lora_rank": 4, "lora_alpha": 8.0}, {}),
    "adapters-hybrid": ((4,), "qwen3", {"lora_rank": 2, "replicate": 2, "lora_targets": ("q_proj", "down_proj")}, {}),
    "every": ((2,), "stories", {"reduce_gradients": "every"}, {}),
    "kept": ((2,), "stories", {"reshard_after_forward": False}, {}),
    "host-memory": ((2,), "stories", {"cpu_offload": True}, {}),
    "checkpointing": ((2,), "gemma2", {}, {"gradient_checkpointing": True}),
    "checkpointing-context": ((2,), "qwen3", {"context_parallel": 2}, {"gradient_checkpointing": True}),
}
ALL = [(name, world) for name, (worlds, *_) in CASES.items() for world in worlds]


def fields(name):
    """(context, model) fields of a case."""
    given = CASES[name][3]
    context = {key: value for key, value in given.items() if key == "head"}
    return context, {key: value for key, value in given.items() if key != "head"}


def batch_of(model):
    return make_batch(LENGTHS, vocab_size=500 if model == "stories" else 61)


def shares(dp_size):
    """Rows of each data-parallel rank: uneven, and the last of four has none."""
    borders = {1: [0, 8], 2: [0, 3, 8], 4: [0, 2, 3, 8, 8]}[dp_size]
    return [list(range(a, b)) for a, b in pairwise(borders)]


def ten_steps(rank, world, directory, names, paths):
    """What a rank does: every case, one after the other."""
    report = {}
    for name in names:
        _, model, config, _ = CASES[name]
        context, options = fields(name)
        context |= {"rank": rank, "world_size": world, "total_steps": STEPS, "seed": 4}
        backend = make_fsdp(paths[model], config=config, context=context, max_tokens_per_device=14, **options)
        share = shares(backend.mesh.dp_size)[backend.mesh.dp_rank]
        batch = batch_of(model)
        scored = backend.forward(batch.take(share), temperature=0.9)
        column = scored.values if scored.log_probs is None else scored.log_probs + 0.5 * scored.entropy
        history = train(backend, batch, STEPS, share=share)
        weights = fsdp_weights(backend)
        if rank == 0:
            save_file({key: value.contiguous() for key, value in weights.items()}, directory / f"{name}.safetensors")
        report[name] = {
            "history": history,
            "dp": [backend.mesh.dp_rank, backend.mesh.dp_size, backend.mesh.returns],
            "outputs": column.tolist(),
        }
    return report


@pytest.fixture(scope="module")
def paths(tmp_path_factory, assets):
    root = tmp_path_factory.mktemp("models")
    families = {model for _, model, _, _ in CASES.values()} - {"stories"}
    return {family: save_model(family, root / family) for family in families} | {
        "stories": str(assets / "models" / "stories260k")
    }


@pytest.fixture(scope="module")
def runs(paths, tmp_path_factory):
    """World size -> (reports of the ranks, directory); made when first asked for."""
    made = {}

    def run(world):
        if world not in made:
            directory = tmp_path_factory.mktemp(f"world{world}")
            names = [name for name, (worlds, *_) in CASES.items() if world in worlds]
            made[world] = run_ranks(world, ten_steps, directory, names, paths, preload=PRELOAD), directory
        return made[world]

    return run


@pytest.fixture(scope="module")
def oracle(paths):
    """Case -> (history, weights, outputs of a forward pass) of `local`."""
    made = {}

    def run(name):
        _, model, config, _ = CASES[name]
        context, options = fields(name)
        of_model = {key: value for key, value in config.items() if key.startswith("lora")}
        key = (model, str(of_model), str(CASES[name][3]))
        if key not in made:
            backend = make_local(
                paths[model], config=of_model, context=context | {"total_steps": STEPS, "seed": 4}, **options
            )
            batch = batch_of(model)
            scored = backend.forward(batch, temperature=0.9)
            column = scored.values if scored.log_probs is None else scored.log_probs + 0.5 * scored.entropy
            made[key] = train(backend, batch, STEPS), local_weights(backend), column
        return made[key]

    return run


@pytest.mark.parametrize(("name", "world"), ALL, ids=[f"{name}-{world}" for name, world in ALL])
def test_ten_steps_equal_local(name, world, runs, oracle, paths):
    reports, directory = runs(world)
    history, weights, outputs = oracle(name)
    mine = [report[name] for report in reports]
    returning = {report["dp"][0]: report for report in mine if report["dp"][2]}

    batch = batch_of(CASES[name][1])
    for dp_rank, share in enumerate(shares(len(returning))):
        expected = [value for row in batch.take(share).split([1] * len(share)) for value in _own(row, batch, outputs)]
        assert returning[dp_rank]["outputs"] == pytest.approx(expected, abs=2e-5)
    losses = torch.tensor([[row[0] for row in report["history"]] for report in returning.values()]).sum(0)
    norms = torch.tensor([row[1] for row in mine[0]["history"]])
    torch.testing.assert_close(losses, torch.tensor([r[0] for r in history]), atol=LOSS_TOLERANCE, rtol=1e-5)
    torch.testing.assert_close(norms, torch.tensor([r[1] for r in history]), atol=1e-5, rtol=1e-4)
    assert [row[2] for row in mine[0]["history"]] == [row[2] for row in history]
    found = load_file(directory / f"{name}.safetensors")
    assert found.keys() == weights.keys()
    for key, weight in weights.items():
        torch.testing.assert_close(found[key], weight, atol=WEIGHT_TOLERANCE, rtol=0, msg=lambda m, k=key: f"{k}: {m}")


def _own(row, batch, outputs):
    """The oracle's outputs of one row, found by its tokens."""
    ids, wanted = batch["input_ids"], row["input_ids"]
    for start, length in zip(batch.offsets().tolist(), batch.lengths.tolist()):
        if length == len(wanted) and torch.equal(ids[start : start + length], wanted):
            return outputs[start : start + length].tolist()
    raise AssertionError("no such row")


def test_ten_steps_move_every_weight_further_than_the_tolerance(oracle, paths):
    from rlcore.models.load import load_model

    _, weights, _ = oracle("sharded")
    start = dict(load_model(paths["stories"]).named_parameters())

    assert min(float((weights[name] - start[name].detach()).abs().max()) for name in start) > 50 * WEIGHT_TOLERANCE
