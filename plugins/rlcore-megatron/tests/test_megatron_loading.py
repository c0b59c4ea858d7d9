"""Weights of another model: each rank takes its slices, and training continues as with `local`."""

import pytest
import torch
from megatron_cases import PRELOAD, another_megatron, make_local, make_megatron, save_model

from rlcore.testing import run_ranks
from rlcore.testing.training import check_equal, follow, load_changed, make_batch, whole_weights

STEPS = 2
TP2, PP2 = {"tensor_parallel": 2}, {"pipeline_parallel": 2}
CASES = {
    # name: (number of ranks, family, settings of the backend, fields of the context)
    "data": (2, "qwen3", {}, {}),
    "plain-optimizer": (2, "llama", TP2 | {"distributed_optimizer": False}, {}),
    "tensor-tied": (2, "qwen2", TP2, {}),
    "virtual": (2, "qwen3", PP2 | {"virtual_stages": 2}, {}),
    "critic": (2, "qwen2", PP2, {"head": "value"}),
    "experts": (2, "qwen3_moe", {"expert_parallel": 2}, {}),
    "pipeline-tied": (4, "qwen2", TP2 | PP2, {}),
    "experts-pipeline": (4, "qwen3_moe", {"expert_parallel": 2} | PP2, {}),
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {family: save_model(family, root / family) for family in {family for _, family, _, _ in CASES.values()}}


def load_and_train(rank, world, directory, paths):
    report = {}
    for name, (size, family, config, context) in CASES.items():
        if size == world:
            place = {"rank": rank, "world_size": world, "total_steps": STEPS, "seed": 4}
            backend = make_megatron(paths[family], config=config, context=context | place, max_tokens_per_device=14)
            load_changed(backend, paths[family])
            report[name] = follow(backend, make_batch(), STEPS, directory / name)
    return report


@pytest.fixture(scope="module")
def reports(paths, tmp_path_factory):
    """Function from the number of ranks to their reports, computed on first use."""
    made = {}

    def run(world):
        if world not in made:
            made[world] = run_ranks(world, load_and_train, tmp_path_factory.mktemp("ranks"), paths, preload=PRELOAD)
        return made[world]

    return run


@pytest.mark.parametrize("name", CASES)
def test_training_continues_from_loaded_weights_as_with_local(name, reports, paths, tmp_path):
    world, family, _, context = CASES[name]
    oracle = make_local(paths[family], context=context | {"total_steps": STEPS, "seed": 4})
    load_changed(oracle, paths[family])

    expected = follow(oracle, make_batch(), STEPS, tmp_path / "local")

    ranks = [report[name] for report in reports(world)]
    check_equal(ranks, expected, make_batch(), without=["lm_head.weight"] if context else [])


@pytest.mark.parametrize("trained", [True, False])
def test_small_changes_are_mixed_into_bfloat16_parameters(trained, paths):
    backend = make_megatron(paths["qwen3"], context={"trained": trained}, precision="bfloat16")
    start = whole_weights(backend)
    away = {name: 1.02 * tensor.float() for name, tensor in start.items()}

    for i in range(60):
        if i == 30:
            backend.offload()
        backend.load_weights(iter(away.items()), 0.05)
    backend.reload()

    expected = {name: away[name] + 0.95**60 * (start[name].float() - away[name]) for name in away}
    for name, tensor in whole_weights(backend).items():
        torch.testing.assert_close(tensor.float(), expected[name], rtol=0.004, atol=1e-6)


def test_a_copy_after_mixing_is_where_the_next_mixing_starts(paths):
    backend = make_megatron(paths["qwen3"], context={"trained": False}, precision="bfloat16")
    other = another_megatron(paths["qwen3"], context={"trained": False}, precision="bfloat16")
    start = whole_weights(other)

    for factor, mix in ((3.0, 0.5), (1.0, 1.0), (2.0, 0.5)):
        backend.load_weights(((name, tensor * factor) for name, tensor in start.items()), mix)

    for name, tensor in whole_weights(backend).items():
        torch.testing.assert_close(tensor.float(), 1.5 * start[name].float(), rtol=0.004, atol=1e-6)
