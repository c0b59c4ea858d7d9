"""Context parallelism: parts without loss tokens, sample borders, and the configuration that attention gets."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from megatron_cases import PRELOAD, make_local, make_megatron, save_model
from torch import nn

from rlcore.protocols.backend import OptimizerConfig
from rlcore.testing import run_ranks
from rlcore.testing.training import column, make_batch, policy_loss

BATCHES = {
    # a prompt has two tokens; the others are under the loss, each computed from the token before it
    "the first target of a part": [4],  # position 2, computed from position 1 on the other rank
    "a part without targets": [3],
    "a part of padding": [1],
    "nothing under the loss": [2, 2, 1],
    "nothing": [],
    "empty samples": [0, 0],
    "a long sample beside short ones": [37, 3, 2, 5, 4],
    "short ones beside a long sample": [3, 1, 6, 2, 41],
}
SPLIT = {"context_parallel": 2, "tensor_parallel": 2}
CASES = [
    (2, {"context_parallel": 2}, "token"),
    (2, {"context_parallel": 2}, "value"),
    (4, SPLIT, "token"),
    (4, SPLIT | {"sequence_parallel": True}, "token"),
]
PLAIN_STEPS = OptimizerConfig(lr=0.0, clip_grad_norm=0.0)


def of_batches(backend):
    """Return name -> (outputs, gradient norm), with an offload and a reload before the step."""
    found = {}
    for name, lengths in BATCHES.items():
        batch = make_batch(lengths)
        outputs = column(backend.forward(batch, temperature=0.9))
        backend.forward_backward(batch, policy_loss(batch), temperature=0.9)
        backend.offload()
        backend.reload()
        found[name] = outputs.tolist(), backend.step()["grad_norm"].value
    return found


def alone(backend):
    """Return the outputs of each sample, computed one by one and in one micro-batch."""
    batch = make_batch(BATCHES["a long sample beside short ones"])
    each = [column(backend.forward(batch.take([row]), temperature=0.9)).tolist() for row in range(len(batch))]
    together = column(backend.forward(batch, temperature=0.9)).split(batch.lengths.tolist())
    return each, [values.tolist() for values in together]


def compute(rank, world, directory, path):
    """Run every case of a world size on one rank, one after the other."""
    report = []
    for size, config, head in CASES:
        if size == world:
            context = {"rank": rank, "world_size": world, "head": head}
            backend = make_megatron(path, config=config, optimizer=PLAIN_STEPS, context=context)
            report.append((backend.mesh.returns, of_batches(backend), alone(backend)))
    return report


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save_model("qwen3", tmp_path_factory.mktemp("model"), num_key_value_heads=4)


@pytest.fixture(scope="module")
def reports(path, tmp_path_factory):
    """Reports of the ranks, by case."""
    found = []
    for world in (2, 4):
        ranks = run_ranks(world, compute, tmp_path_factory.mktemp(f"world{world}"), path, preload=PRELOAD)
        found += list(zip(*ranks))
    return found


@pytest.mark.parametrize("case", range(len(CASES)), ids=str)
def test_parts_without_loss_tokens_and_sample_borders_equal_local(case, path, reports):
    local = make_local(path, optimizer=PLAIN_STEPS, context={"head": CASES[case][2]})

    for name, (outputs, norm) in of_batches(local).items():
        for returns, found, _ in reports[case]:
            assert found[name][1] == pytest.approx(norm, rel=1e-4, abs=1e-6), name
            if returns:
                assert found[name][0] == pytest.approx(outputs, abs=2e-5), name


@pytest.mark.parametrize("case", range(len(CASES)), ids=str)
def test_attention_never_crosses_a_sample(case, reports):
    ((_, _, (each, together)),) = (report for report in reports[case] if report[0])

    for one, beside in zip(each, together, strict=True):
        assert one == pytest.approx(beside, abs=2e-5)


class Engine(nn.Module):
    """Stand-in for Transformer Engine's attention that records its configuration and arguments."""

    def __init__(self, config, layer_number):
        super().__init__()
        self.heads = config.num_attention_heads, config.num_query_groups
        self.layer_number = layer_number

    def forward(self, query, key, value, attention_mask, packed_seq_params, **options):
        self.given = packed_seq_params
        return query


def test_wrapped_attention_has_a_part_of_the_heads_and_gets_the_borders_of_all_samples(monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from rlcore_megatron import MegatronConfig, model

    attention = SimpleNamespace(core_attention=Engine)
    inside = SimpleNamespace(self_attention=SimpleNamespace(submodules=attention))
    spec = SimpleNamespace(submodules=inside)
    monkeypatch.setattr(MegatronConfig, "uses_transformer_engine", lambda config, precision: True)
    monkeypatch.setattr(model, "get_gpt_layer_with_transformer_engine_spec", lambda **options: spec)
    monkeypatch.setattr("rlcore.kits.backend.ulysses._exchange", lambda by_rank, group: by_rank)
    config = SimpleNamespace(num_attention_heads=8, num_query_groups=4, qk_layernorm=False, num_moe_experts=None)
    context = SimpleNamespace(size=lambda: 2, rank=lambda: 1)
    samples = model.Samples.of([5, 3], torch.device("cpu"))

    found = model._spec(config, MegatronConfig(context_parallel=2), "bfloat16", context)
    core = found.submodules.self_attention.submodules.core_attention(config=config, layer_number=3)
    query, key = torch.zeros(4, 8, 2), torch.zeros(4, 4, 2)
    out = core(query, key, key, None, packed_seq_params=samples.part(context), attn_mask_type="causal")

    assert (core.heads, core.layer_number, config.num_attention_heads) == ((4, 2), 3, 8)
    assert core.given.cu_seqlens_q.tolist() == [0, 5, 8]
    assert out.shape == (4, 16)
    part = samples.part(context)
    assert (part.cu_seqlens_q.tolist(), part.positions.tolist()) == ([0, 4], [4, 0, 1, 2])
