"""The planned bytes of a model compared with torch's memory tracker, on one of up to 1,024 fake ranks.

Covered: shards, gathered parameters, gradients and optimizer state. Not covered: activations, tensor parallelism (its
mesh cannot be built from fake tensors), host memory, fragmentation of the CUDA allocator and NCCL's buffers.
"""

import pytest
import torch
import transformers
from fake_ranks import main
from fsdp_cases import PRELOAD
from rlcore_fsdp import FSDPBackend, FSDPConfig

from rlcore.models.size import ModelSize
from rlcore.testing import run_ranks

SHAPES = {
    "large-head": {"vocab_size": 32768, "hidden_size": 2048, "intermediate_size": 8192},
    "large-layers": {"vocab_size": 4096, "hidden_size": 4096, "intermediate_size": 14336},
}
ACTIVATIONS = 4 * 2**20
"""Upper bound in bytes of the activations of two tokens."""


def save_config(directory, shape, *, tied=False):
    """Write config.json, and return the size that a plan reads from a complete model directory."""
    heads = {"num_hidden_layers": 3, "num_attention_heads": 16, "num_key_value_heads": 4}
    config = transformers.LlamaConfig(**SHAPES[shape], **heads, tie_word_embeddings=tied)
    config.save_pretrained(directory)
    with torch.device("meta"):
        parameters = transformers.LlamaForCausalLM(config).parameters()
    return ModelSize(
        num_parameters=sum(parameter.numel() for parameter in parameters),
        num_layers=3,
        hidden_size=config.hidden_size,
        num_kv_values=2 * config.hidden_size // 4,
        vocab_size=config.vocab_size,
        tied=tied,
    )


def planned_bytes(size, world_size, *, trained=True, precision="bfloat16", **settings):
    config, about = FSDPConfig(**settings), {"world_size": world_size, "trained": trained}
    held = FSDPBackend.model_bytes(config, size.num_parameters, **about)
    return held + FSDPBackend.working_bytes(config, size, precision=precision, **about)


@pytest.mark.parametrize("reduce_gradients", ["every", "last"])
@pytest.mark.parametrize("world_size", [1, 8, 16, 1024])
def test_plan_covers_the_tracked_peak_of_a_step_within_ten_per_cent(world_size, reduce_gradients, tmp_path):
    case = {"world_size": world_size, "reduce_gradients": reduce_gradients}
    size = save_config(tmp_path, "large-layers")

    (peak,) = run_ranks(1, main, tmp_path, str(tmp_path), case, preload=PRELOAD)

    assert peak - ACTIVATIONS < planned_bytes(size, **case) < 1.1 * peak


@pytest.mark.parametrize(
    ("shape", "tied", "case"),
    [
        ("large-head", False, {}),
        ("large-head", True, {}),
        ("large-head", False, {"precision": "float32"}),
        ("large-head", True, {"precision": "float32"}),
        ("large-layers", False, {"precision": "float32"}),
        ("large-layers", False, {"reshard_after_forward": False}),
        ("large-layers", False, {"replicate": 2}),
        ("large-layers", False, {"trained": False}),
        ("large-layers", True, {"trained": False}),
        ("large-layers", False, {"trained": False, "reshard_after_forward": False}),
    ],
    ids=str,
)
def test_plan_covers_the_tracked_peak_with_other_settings(shape, tied, case, tmp_path):
    size = save_config(tmp_path, shape, tied=tied)

    (peak,) = run_ranks(1, main, tmp_path, str(tmp_path), {"world_size": 8} | case, preload=PRELOAD)

    assert peak - ACTIVATIONS < planned_bytes(size, 8, **case) < 1.1 * peak
