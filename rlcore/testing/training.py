"""Comparison of a backend on several ranks with `local`: small models, uneven shares of a batch, and a loss.

Each rank trains and reports; the test compares all reports with the reference, which gets the whole batch:

    def steps(rank, world, directory, path):
        return follow(my_backend(path, rank, world), make_batch(), 6, directory / "weights.safetensors")

    def test_ranks_equal_local(path, tmp_path):
        reports = run_ranks(2, steps, tmp_path, path)
        whole = follow(local_backend(path), make_batch(), 6, tmp_path / "local.safetensors")
        check_equal(reports, whole, make_batch())

Shapes: T tokens of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlcore.data.batch import Batch
from rlcore.models.load import load_model
from rlcore.protocols.backend import Backend, OptimizerConfig
from rlcore.types import LossFunction, LossTerms, Mean, Metrics, TokenOutputs
from rlcore.workers.averaging import count, reduce_terms

VOCABULARY = 61
"""Prime, so that no number of devices divides it."""
LENGTHS = (9, 4, 12, 2, 7, 5, 11, 3)
"""Lengths of the samples in tokens; the fourth one has only a prompt."""
GENTLE = OptimizerConfig(lr=1e-2, eps=1e-2, schedule="linear", warmup_steps=2, weight_decay=0.1, clip_grad_norm=0.5)
"""AdamW with an eps as large as the gradients; dividing by tiny gradients would amplify rounding differences."""
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.3,  # the default of 0.02 makes attention and logits almost uniform
}
_GEMMA = {"head_dim": 16, "sliding_window": 4, "query_pre_attn_scalar": 10}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": False}),
    "qwen3": ("Qwen3Config", {"head_dim": 16, "tie_word_embeddings": False}),
    "gemma2": ("Gemma2Config", {**_GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3TextConfig", _GEMMA),
    "qwen3_moe": ("Qwen3MoeConfig", {"head_dim": 16, "tie_word_embeddings": False, **_EXPERTS}),
    "glm4_moe": ("Glm4MoeConfig", {"head_dim": 8, "n_routed_experts": 4, "first_k_dense_replace": 1, **_EXPERTS}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
"""Name -> (configuration class of transformers, changes to the sizes above)."""


def save_model(family: str, directory: Path, **changes: Any) -> str:
    """Save a random model, with norms, biases and buffers that are not all one or zero; return its path."""
    import transformers

    config_class, own = FAMILIES[family]
    config = getattr(transformers, config_class)(**{**_SIZES, **own, **changes})
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).float()
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.dim() == 1:
                tensor.add_(torch.randn_like(tensor), alpha=0.1 if "norm" in name else 0.3)
    model.save_pretrained(directory)
    return str(directory)


def make_batch(lengths: Sequence[int] = LENGTHS, *, seed: int = 0, vocab_size: int = VOCABULARY) -> Batch:
    """Return random samples with a prompt of two tokens each, which are not in the loss."""
    ids = torch.randint(3, vocab_size, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    mask = torch.tensor([place >= 2 for length in lengths for place in range(length)], dtype=torch.bool)
    rows = {
        "sample_id": torch.arange(len(lengths)),
        "num_loss_tokens": torch.tensor([max(0, length - 2) for length in lengths]),
    }
    return Batch.of(lengths=lengths, tokens={"input_ids": ids, "loss_mask": mask}, rows=rows)


def shares(dp_size: int) -> list[list[int]]:
    """Return the rows of each data-parallel rank: uneven, and the last of four ranks has none."""
    borders = {1: [0, 8], 2: [0, 3, 8], 4: [0, 2, 3, 8, 8]}[dp_size]
    return [list(range(start, stop)) for start, stop in pairwise(borders)]


def policy_loss(batch: Batch) -> LossFunction:
    """Return a loss over the whole mini-batch, as in workers, of log-probs and entropy or of values."""
    counts = count(batch["num_loss_tokens"])

    def loss(out: TokenOutputs, micro_batch: Batch) -> tuple[Tensor, Metrics]:
        of_token = (micro_batch["input_ids"] % 7).float() - 3.0
        if out.log_probs is not None and out.entropy is not None:
            terms = out.log_probs * of_token + 0.1 * out.entropy
        else:
            assert out.values is not None, "outputs hold log_probs and entropy, or values"
            terms = (out.values - of_token) ** 2
        scalar = reduce_terms(LossTerms(terms=terms, average="token-mean"), micro_batch, counts)
        return scalar, {"loss": Mean(float(scalar.detach()), 0.0)}

    return loss


def column(out: TokenOutputs) -> Tensor:
    """Combine all outputs of a forward pass into one [T] column."""
    if out.log_probs is None or out.entropy is None:
        assert out.values is not None, "outputs hold log_probs and entropy, or values"
        return out.values
    return out.log_probs + 0.5 * out.entropy


def train(backend: Backend, batch: Batch, steps: int, *, share: Sequence[int] | None = None) -> list[list[float]]:
    """Train for some steps on the rows `share`; return [[loss of this rank, gradient norm, lr]]."""
    history = []
    mine = batch if share is None else batch.take(share)
    for _ in range(steps):
        metrics = backend.forward_backward(mine, policy_loss(batch), temperature=0.9)
        stepped = backend.step()
        history.append([metrics.get("loss", Mean(0.0)).total, stepped["grad_norm"].value, stepped["lr"].value])
    return history


def whole_weights(backend: Backend) -> dict[str, Tensor]:
    """Return name -> copy of the full weight; every rank calls it."""
    return {name: tensor.clone() for name, tensor in backend.weights()}


def load_changed(backend: Backend, path: str) -> None:
    """Load the weights of a model directory times 1.25, and then mix in half of them; every rank calls it."""
    for mix, factor in ((1.0, 1.25), (0.25, 0.5)):
        weights = load_model(path).named_parameters()
        backend.load_weights(((name, parameter.detach() * factor) for name, parameter in weights), mix)


def follow(
    backend: Backend,
    batch: Batch,
    steps: int,
    file: Path,
    *,
    weights: Callable[[Any], Mapping[str, Tensor]] = whole_weights,
) -> dict[str, Any]:
    """Train a rank on its share of a batch and return its report; rank 0 saves the final weights in `file`."""
    share = shares(backend.mesh.dp_size)[backend.mesh.dp_rank]
    outputs = column(backend.forward(batch.take(share), temperature=0.9)).tolist()
    history = train(backend, batch, steps, share=share)
    found = weights(backend)
    if backend.mesh.rank == 0:
        save_file({name: tensor.contiguous() for name, tensor in found.items()}, file)
    total = float(sum(tensor.double().sum() for tensor in found.values()))
    dp = [backend.mesh.dp_rank, backend.mesh.dp_size, backend.mesh.returns]
    return {"dp": dp, "outputs": outputs, "history": history, "sum": total, "file": str(file)}


def check_equal(
    ranks: Sequence[Mapping[str, Any]],
    whole: Mapping[str, Any],
    batch: Batch,
    *,
    loss_tolerance: float = 5e-6,
    weight_tolerance: float = 2e-5,
    norm_tolerance: float = 1e-4,
    without: Sequence[str] = (),
) -> None:
    """Compare the reports of the ranks with that of one rank with the whole batch.

    Args:
        norm_tolerance: relative, of gradient norms after the first step; the first norm may differ by 1e-5.
        without: weights that the ranks do not return.
    """
    returning = {report["dp"][0]: report for report in ranks if report["dp"][2]}
    assert sum(report["dp"][2] for report in ranks) == len(returning) == ranks[0]["dp"][1], "one returns for each share"
    of_rows = torch.split(torch.tensor(whole["outputs"]), batch.lengths.tolist())
    for dp_rank, share in enumerate(shares(len(returning))):
        expected = [value for row in share for value in of_rows[row].tolist()]
        assert returning[dp_rank]["outputs"] == pytest.approx(expected, abs=2e-5)
    losses, norms, rates = zip(*whole["history"])
    found = torch.tensor([[row[0] for row in report["history"]] for report in returning.values()]).sum(0)
    torch.testing.assert_close(found, torch.tensor(losses), atol=loss_tolerance, rtol=1e-5)
    for report in ranks:
        _, own_norms, own_rates = zip(*report["history"])
        torch.testing.assert_close(own_norms[0], norms[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(torch.tensor(own_norms), torch.tensor(norms), atol=1e-5, rtol=norm_tolerance)
        assert own_rates == rates
        assert report["sum"] == ranks[0]["sum"], "every rank must return the same weights"
    weights, expected_weights = load_file(ranks[0]["file"]), load_file(whole["file"])
    assert weights.keys() == expected_weights.keys() - set(without)
    for name, weight in weights.items():
        gap = float((weight - expected_weights[name]).abs().max())
        assert gap <= weight_tolerance, f"{name} differs from that of `local` by {gap:.3g}"
