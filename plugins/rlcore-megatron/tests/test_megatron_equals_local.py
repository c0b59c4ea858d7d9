"""Log-probs, losses, gradient norms and weights after six steps equal those of `local`, on every grid.

Tolerances: sums over devices and micro-batches are added in another order than in one process, which changes the last one
or two float32 bits (6e-8 relative each) in every step. Over six steps of an optimizer that never divides by less than 1e-2,
this grows by less than a factor of 100. A lost or doubled gradient is off by at least 1e-2.
"""

import pytest
import torch
from megatron_cases import PRELOAD, make_local, make_megatron, save_model
from safetensors.torch import load_file, save_file

from rlcore.models.load import load_model
from rlcore.testing import run_ranks
from rlcore.testing.training import check_equal, follow, make_batch, whole_weights

STEPS = 6
WEIGHT_TOLERANCE = 2e-5

TP2, PP2, CP2 = {"tensor_parallel": 2}, {"pipeline_parallel": 2}, {"context_parallel": 2}
SP2, EP2 = TP2 | {"sequence_parallel": True}, {"expert_parallel": 2}
WIDE = {"num_key_value_heads": 4}
PLAIN = {"distributed_optimizer": False}
CASES = {
    # name: (world sizes, family, settings of the backend, fields of the context and the model)
    "llama": ((1, 2), "llama", {}, {}),
    "qwen2": ((1,), "qwen2", {}, {}),
    "qwen3": ((1,), "qwen3", {}, {}),
    "plain-optimizer": ((1, 2), "qwen3", PLAIN, {}),
    "llama-tensor": ((2, 4), "llama", TP2, {}),
    "qwen2-tensor": ((2,), "qwen2", TP2, {}),
    "qwen3-tensor": ((2,), "qwen3", TP2 | PLAIN, {}),
    "sequence": ((2,), "qwen3", TP2 | {"sequence_parallel": True}, {}),
    "llama-pipeline": ((2,), "llama", PP2 | PLAIN, {}),
    "qwen2-pipeline": ((2, 4), "qwen2", PP2, {}),
    "qwen3-pipeline": ((2,), "qwen3", PP2, {}),
    "four-stages": ((4,), "qwen2", {"pipeline_parallel": 4}, {}),
    "llama-both": ((4,), "llama", TP2 | PP2, {}),
    "qwen2-both": ((4,), "qwen2", TP2 | PP2, {}),
    "qwen3-both": ((4,), "qwen3", TP2 | PP2 | {"sequence_parallel": True} | PLAIN, {}),
    "data": ((4,), "qwen3", {}, {}),
    "uneven": ((2,), "qwen3", PP2 | {"first_stage_layers": 1}, {}),
    "uneven-tied": ((4,), "qwen2", PP2 | TP2 | {"last_stage_layers": 1}, {}),
    "virtual": ((2,), "qwen3", PP2 | {"virtual_stages": 2}, {}),
    "virtual-tied": ((4,), "qwen2", PP2 | TP2 | {"virtual_stages": 2}, {}),
    "experts": ((1, 2), "qwen3_moe", {}, {}),
    "experts-shared": ((2, 4), "qwen3_moe", {"expert_parallel": 2}, {}),
    "experts-plain": ((2,), "qwen3_moe", {"expert_parallel": 2} | PLAIN, {}),
    "experts-pipeline": ((4,), "qwen3_moe", {"expert_parallel": 2} | PP2, {}),
    "experts-tensor": ((2, 4), "qwen3_moe", {"expert_parallel": 2, "sequence_parallel": True} | TP2, {}),
    "critic": ((1,), "qwen2", {}, {"head": "value"}),
    "critic-tensor": ((2,), "qwen3", TP2 | {"sequence_parallel": True}, {"head": "value"}),
    "critic-pipeline": ((2,), "qwen2", PP2, {"head": "value"}),
    "context": ((2, 4), "qwen3", CP2, {}),
    "context-tensor": ((4,), "llama-wide", CP2 | TP2 | PLAIN, {}),
    "context-sequence": ((4,), "qwen3-wide", CP2 | SP2, {}),
    "context-pipeline": ((4,), "qwen2", CP2 | PP2, {}),
    "context-virtual": ((4,), "qwen3", CP2 | PP2 | {"virtual_stages": 2} | PLAIN, {}),
    "context-of-four": ((4,), "qwen2-wide", {"context_parallel": 4}, {}),
    "context-experts": ((2, 4), "qwen3_moe", CP2 | EP2, {}),
    "context-experts-alone": ((2,), "qwen3_moe", CP2, {}),
    "context-experts-pipeline": ((4,), "qwen3_moe", CP2 | EP2 | PP2 | PLAIN, {}),
    "context-experts-sequence": ((4,), "qwen3_moe-wide", CP2 | EP2 | SP2, {}),
    "critic-context": ((2, 4), "qwen2", CP2, {"head": "value"}),
    "recompute-context": ((2,), "qwen3", CP2, {"gradient_checkpointing": True}),
    "recompute-selective-context": ((2,), "llama", CP2 | {"recompute": "selective"}, {"gradient_checkpointing": True}),
    "recompute": ((2,), "qwen3", TP2, {"gradient_checkpointing": True}),
    "recompute-selective": ((2,), "qwen3", PP2 | {"recompute": "selective"}, {"gradient_checkpointing": True}),
}
SLOW = (
    "context-virtual",
    "context-of-four",
    "context-sequence",
    "context-experts-alone",
    "context-experts-pipeline",
    "context-experts-sequence",
    "recompute-context",
    "recompute-selective-context",
)
ALL = [
    pytest.param(name, world, id=f"{name}-{world}", marks=[pytest.mark.slow] if name in SLOW else [])
    for name, (worlds, *_) in CASES.items()
    for world in worlds
]


def fields(name):
    """Return the fields of BackendContext and ModelConfig of a case."""
    given = CASES[name][3]
    context = {key: value for key, value in given.items() if key == "head"}
    return context, {key: value for key, value in given.items() if key != "head"}


def some_steps(rank, world, directory, names, paths):
    """Run every case on one rank, one after the other."""
    report = {}
    for name in names:
        _, family, config, _ = CASES[name]
        context, options = fields(name)
        context |= {"rank": rank, "world_size": world, "total_steps": STEPS, "seed": 4}
        backend = make_megatron(paths[family], config=config, context=context, max_tokens_per_device=14, **options)
        start = whole_weights(backend)
        if rank == 0:
            save_file({key: value.contiguous() for key, value in start.items()}, directory / f"{name}.start")
        report[name] = follow(backend, make_batch(), STEPS, directory / f"{name}.safetensors")
    return report


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    made = {}
    for name in {name for _, name, _, _ in CASES.values()}:
        family, _, wide = name.partition("-")
        made[name] = save_model(family, root / name, **(WIDE if wide else {}))
    return made


@pytest.fixture(scope="module")
def runs(paths, tmp_path_factory):
    """Function from case and world size to (reports of the ranks, directory); runs all cases of a size on first use."""
    made = {}

    def run(name, world):
        slow = name in SLOW
        if (world, slow) not in made:
            directory = tmp_path_factory.mktemp(f"world{world}")
            names = [each for each, (worlds, *_) in CASES.items() if world in worlds and (each in SLOW) == slow]
            made[world, slow] = (
                run_ranks(world, some_steps, directory, names, paths, preload=PRELOAD, timeout_s=300),
                directory,
            )
        return made[world, slow]

    return run


@pytest.fixture(scope="module")
def oracle(paths, tmp_path_factory):
    """Function from a case to the report of `local`."""
    made, directory = {}, tmp_path_factory.mktemp("local")

    def run(name):
        _, family, _, _ = CASES[name]
        context, _ = fields(name)
        key = (family, str(context))
        if key not in made:
            backend = make_local(paths[family], context=context | {"total_steps": STEPS, "seed": 4})
            made[key] = follow(backend, make_batch(), STEPS, directory / f"{len(made)}.safetensors")
        return made[key]

    return run


@pytest.mark.parametrize(("name", "world"), ALL)
def test_steps_equal_local(name, world, runs, oracle):
    reports, _ = runs(name, world)
    is_critic = CASES[name][3].get("head") == "value"

    check_equal(
        [report[name] for report in reports],
        oracle(name),
        make_batch(),
        weight_tolerance=WEIGHT_TOLERANCE,
        without=["lm_head.weight"] if is_critic else [],
    )


@pytest.mark.parametrize(("name", "world"), ALL)
def test_weights_equal_the_files_bit_for_bit(name, world, runs, paths):
    _, directory = runs(name, world)
    _, family, _, _ = CASES[name]

    found = load_file(directory / f"{name}.start")

    expected = dict(load_model(paths[family]).named_parameters())
    assert all(torch.equal(tensor, expected[key].detach()) for key, tensor in found.items())
    assert len(found) >= len(expected) - 1  # a critic has no output embedding


def test_steps_change_every_weight_by_more_than_the_tolerance(oracle, paths):
    weights = load_file(oracle("qwen3")["file"])
    start = dict(load_model(paths["qwen3"]).named_parameters())

    assert min(float((weights[name] - start[name].detach()).abs().max()) for name in start) > 50 * WEIGHT_TOLERANCE
