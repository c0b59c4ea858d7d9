"""A pairwise loss on two ranks has the gradient of plain PyTorch, whatever the micro-batches."""

import pytest
import torch
import torch.nn.functional as F
from fsdp_cases import PRELOAD, make_fsdp
from rlcore_tests.pairs import make_pairs, plain_pair_gradients
from safetensors.torch import load_file, save_file

from rlcore.data.shares import share_sizes
from rlcore.testing import run_ranks
from rlcore.testing.training import save_model
from rlcore.types import LossTerms, Mean
from rlcore.workers.averaging import count, reduce_terms

MAX_TOKENS = (16384, 20, 1)


def gradients_of_ranks(rank, world, directory, path):
    """Save the gradients for each micro-batch size; return this rank's losses and rows."""
    pairs = make_pairs().balance(world)
    counts = count(pairs["num_loss_tokens"], pairs.unit_sizes())
    share = pairs.split(share_sizes(pairs.unit_sizes(), world))[rank]

    def loss(out, micro_batch):
        gap = torch.where(micro_batch["loss_mask"], out.log_probs - micro_batch["ref_log_probs"], 0.0)
        x = micro_batch.per_row(gap)
        terms = LossTerms(terms=-F.logsigmoid(x[0::2] - x[1::2]), average="unit-mean")
        scalar = reduce_terms(terms, micro_batch, counts)
        return scalar, {"loss": Mean(scalar.item()), "micro_batches": Mean(1.0)}

    found = []
    for max_tokens in MAX_TOKENS:
        backend = make_fsdp(path, context={"rank": rank, "world_size": world}, max_tokens_per_device=max_tokens)
        metrics = backend.forward_backward(share, loss, temperature=1.0)
        gradients = {name: parameter.grad.full_tensor() for parameter, name in backend._names.items()}
        if rank == 0:
            save_file(gradients, directory / f"{max_tokens}.safetensors")
        found.append([metrics["loss"].total, metrics["micro_batches"].total])
    return {"found": found, "rows": share["sample_id"].tolist()}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save_model("qwen2", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(path, directory):
    return run_ranks(2, gradients_of_ranks, directory, path, preload=PRELOAD)


def test_each_rank_has_whole_pairs(ranks):
    pairs = sorted(tuple(pair) for rank in ranks for pair in zip(rank["rows"][0::2], rank["rows"][1::2]))

    assert pairs == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [len(rank["rows"]) for rank in ranks] == [4, 4]


@pytest.mark.parametrize("number", range(len(MAX_TOKENS)), ids=[f"{number}-tokens" for number in MAX_TOKENS])
def test_the_gradient_of_pairs_is_that_of_plain_pytorch(ranks, path, directory, number):
    wanted, loss = plain_pair_gradients(path, make_pairs())

    found = load_file(directory / f"{MAX_TOKENS[number]}.safetensors")

    assert sum(rank["found"][number][0] for rank in ranks) == pytest.approx(loss, rel=1e-5)
    assert [rank["found"][number][1] for rank in ranks] == [1 if number == 0 else 2] * 2
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert float((found[name] - gradient).norm()) <= 1e-5 * float(gradient.norm()) + 1e-8, name
