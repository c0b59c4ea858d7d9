"""Losses, gradient norms and weights after ten steps equal those of `local`, on every grid of one, two and four processes.

Tolerances: sums over ranks and shards are added in another order than in one process, which changes the last one or two
float32 bits (6e-8 relative each) in every step. Over ten steps of an optimizer that never divides by less than 1e-2, this
grows by less than a factor of 100. A lost or doubled gradient is off by at least 1e-2.

Gradient norms of the story model amplify such differences: they vary between 12 and 53, and at step 7 `local` in float32
is off by 1.5e-4 from float64, two tensor-parallel ranks by 1.7e-4. Initial weights that differ by 6e-8 change them by up
to 6e-4, but the final weights by 1e-6 only.
"""

import pytest
from fsdp_cases import PRELOAD, fsdp_weights, local_weights, make_fsdp, make_local
from safetensors.torch import load_file

from rlcore.models.load import load_model
from rlcore.testing import run_ranks
from rlcore.testing.training import check_equal, follow, make_batch, save_model

NUM_BYTES = 256
STEPS = 10
WEIGHT_TOLERANCE = 2e-5
NORM_TOLERANCE = 2e-3

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
    "experts-balanced": ((2,), "glm4_moe", {}, {}),
    "mixtral": ((2,), "mixtral", {}, {}),
    "critic": ((1, 2, 4), "qwen2", {}, {"head": "value"}),
    "critic-context": ((2,), "qwen2", {"context_parallel": 2}, {"head": "value"}),
    "adapters": ((1, 2, 4), "stories", {"lora_rank": 4, "lora_alpha": 8.0}, {}),
    "adapters-hybrid": ((4,), "qwen3", {"lora_rank": 2, "replicate": 2, "lora_targets": ("q_proj", "down_proj")}, {}),
    "adapters-tensor": ((2, 4), "qwen3", {"lora_rank": 2, "lora_alpha": 3.0, "tensor_parallel": 2}, {}),
    "adapters-tensor-hybrid": (
        (4,),
        "qwen2",
        {"lora_rank": 2, "tensor_parallel": 2, "replicate": 2, "lora_targets": ("q_proj", "o_proj")},
        {},
    ),
    "reduced-last": ((2,), "stories", {"reduce_gradients": "last"}, {}),
    "kept": ((2,), "stories", {"reshard_after_forward": False}, {}),
    "host-memory": ((2,), "stories", {"cpu_offload": True}, {}),
    "checkpointing": ((2,), "gemma2", {}, {"gradient_checkpointing": True}),
    "checkpointing-context": ((2,), "qwen3", {"context_parallel": 2}, {"gradient_checkpointing": True}),
}
ALL = [(name, world) for name, (worlds, *_) in CASES.items() for world in worlds]


def fields(name):
    """Return the fields of BackendContext and ModelConfig of a case."""
    given = CASES[name][3]
    context = {key: value for key, value in given.items() if key == "head"}
    return context, {key: value for key, value in given.items() if key != "head"}


def batch_of(model):
    if model != "stories":
        return make_batch()
    batch = make_batch(vocab_size=250)
    return batch.with_tokens(input_ids=batch["input_ids"] + NUM_BYTES)  # bytes do not occur in the model's texts


def ten_steps(rank, world, directory, names, paths):
    """Run every case on one rank, one after the other."""
    report = {}
    for name in names:
        _, model, config, _ = CASES[name]
        context, options = fields(name)
        context |= {"rank": rank, "world_size": world, "total_steps": STEPS, "seed": 4}
        backend = make_fsdp(paths[model], config=config, context=context, max_tokens_per_device=14, **options)
        file = directory / f"{name}.safetensors"
        report[name] = follow(backend, batch_of(model), STEPS, file, weights=fsdp_weights)
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
    """Function from world size to the reports of the ranks, computed on first use."""
    made = {}

    def run(world):
        if world not in made:
            directory = tmp_path_factory.mktemp(f"world{world}")
            names = [name for name, (worlds, *_) in CASES.items() if world in worlds]
            made[world] = run_ranks(world, ten_steps, directory, names, paths, preload=PRELOAD, timeout_s=300)
        return made[world]

    return run


@pytest.fixture(scope="module")
def oracle(paths, tmp_path_factory):
    """Function from a case to the report of `local`."""
    made, directory = {}, tmp_path_factory.mktemp("local")

    def run(name):
        _, model, config, _ = CASES[name]
        context, options = fields(name)
        of_model = {key: value for key, value in config.items() if key.startswith("lora")}
        key = (model, str(of_model), str(CASES[name][3]))
        if key not in made:
            context |= {"total_steps": STEPS, "seed": 4}
            backend = make_local(paths[model], config=of_model, context=context, **options)
            file = directory / f"{len(made)}.safetensors"
            made[key] = follow(backend, batch_of(model), STEPS, file, weights=local_weights)
        return made[key]

    return run


@pytest.mark.parametrize(("name", "world"), ALL, ids=[f"{name}-{world}" for name, world in ALL])
def test_ten_steps_equal_local(name, world, runs, oracle):
    reports = [report[name] for report in runs(world)]

    check_equal(
        reports,
        oracle(name),
        batch_of(CASES[name][1]),
        weight_tolerance=WEIGHT_TOLERANCE,
        norm_tolerance=NORM_TOLERANCE,
    )


def test_ten_steps_change_every_weight_by_more_than_the_tolerance(oracle, paths):
    weights = load_file(oracle("sharded")["file"])
    start = dict(load_model(paths["stories"]).named_parameters())

    assert min(float((weights[name] - start[name].detach()).abs().max()) for name in start) > 50 * WEIGHT_TOLERANCE
