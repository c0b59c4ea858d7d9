"""Weights of another model: each rank takes its part, and training continues as with `local`."""

import pytest
from fsdp_cases import PRELOAD, fsdp_weights, local_weights, make_fsdp, make_local

from rlcore.errors import ConfigError
from rlcore.testing import run_ranks
from rlcore.testing.training import check_equal, follow, load_changed, make_batch, save_model

STEPS = 2
CASES = {
    "sharded": ("qwen2", {}, {}),
    "replicated": ("qwen3", {"replicate": 2}, {}),
    "tensor": ("qwen3", {"tensor_parallel": 2}, {}),
    "context": ("qwen2", {"context_parallel": 2}, {}),
    "experts": ("qwen3_moe", {}, {}),
    "critic": ("qwen2", {}, {"head": "value"}),
    "host-memory": ("qwen2", {"cpu_offload": True}, {}),
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {family: save_model(family, root / family) for family in {family for family, _, _ in CASES.values()}}


def load_and_train(rank, world, directory, paths):
    report = {}
    for name, (family, config, context) in CASES.items():
        place = {"rank": rank, "world_size": world, "total_steps": STEPS, "seed": 4}
        backend = make_fsdp(paths[family], config=config, context=context | place, max_tokens_per_device=14)
        load_changed(backend, paths[family])
        report[name] = follow(backend, make_batch(), STEPS, directory / name, weights=fsdp_weights)
    return report


@pytest.fixture(scope="module")
def reports(paths, tmp_path_factory):
    return run_ranks(2, load_and_train, tmp_path_factory.mktemp("ranks"), paths, preload=PRELOAD)


@pytest.mark.parametrize("name", CASES)
def test_training_continues_from_loaded_weights_as_with_local(name, reports, paths, tmp_path):
    family, _, context = CASES[name]
    oracle = make_local(paths[family], context=context | {"total_steps": STEPS, "seed": 4})
    load_changed(oracle, paths[family])

    expected = follow(oracle, make_batch(), STEPS, tmp_path / "local", weights=local_weights)

    check_equal([report[name] for report in reports], expected, make_batch())


def test_a_model_with_adapters_refuses_the_weights_of_another(paths):
    backend = make_fsdp(paths["qwen2"], config={"lora_rank": 2})

    with pytest.raises(ConfigError, match=r"lora_rank=2: .*\nType  backend.lora_rank=0"):
        backend.load_weights(iter([]))
