"""The comparison of ranks with `local` accepts equal reports and detects each difference."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlcore.backends.local import LocalBackend, LocalConfig
from rlcore.protocols.backend import BackendContext, ModelConfig
from rlcore.testing.training import FAMILIES, GENTLE, check_equal, follow, make_batch, save_model, shares


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the report of `local` after three steps."""
    directory = tmp_path_factory.mktemp("whole")
    path = save_model("qwen2", directory / "model")
    backend = LocalBackend(
        LocalConfig(), model=ModelConfig(path=path), optimizer=GENTLE, context=BackendContext(total_steps=3)
    )
    return follow(backend, make_batch(), 3, directory / "whole.safetensors")


@pytest.fixture
def ranks(whole, tmp_path):
    """Return the reports that two ranks would give of the same steps."""
    outputs = torch.split(torch.tensor(whole["outputs"]), make_batch().lengths.tolist())
    file = tmp_path / "ranks.safetensors"
    save_file(load_file(whole["file"]), file)
    return [
        {
            "dp": [rank, 2, True],
            "outputs": [value for row in share for value in outputs[row].tolist()],
            "history": [[loss * part, norm, lr] for loss, norm, lr in whole["history"]],
            "sum": whole["sum"],
            "file": str(file),
        }
        for rank, (share, part) in enumerate(zip(shares(2), (0.25, 0.75)))
    ]


def test_equal_ranks_pass(ranks, whole):
    check_equal(ranks, whole, make_batch())


def swap_rows(ranks):
    ranks[0]["outputs"], ranks[1]["outputs"] = ranks[1]["outputs"], ranks[0]["outputs"]


def lose_a_loss(ranks):
    ranks[1]["history"][2][0] = 0.0


def halve_a_norm(ranks):
    ranks[1]["history"][1][1] /= 2


def change_the_first_norm(ranks):
    ranks[0]["history"][0][1] *= 1 + 5e-5


def keep_the_rate(ranks):
    ranks[0]["history"][1][2] = ranks[0]["history"][0][2]


def return_twice(ranks):
    ranks.append(copy.deepcopy(ranks[1]))


def give_other_weights(ranks):
    ranks[1]["sum"] += 1.0


def move_a_weight(ranks):
    weights = load_file(ranks[0]["file"])
    weights["model.norm.weight"][3] += 1e-4
    save_file(weights, ranks[0]["file"])


def lose_a_weight(ranks):
    weights = load_file(ranks[0]["file"])
    del weights["model.norm.weight"]
    save_file(weights, ranks[0]["file"])


@pytest.mark.parametrize(
    "damage",
    [
        swap_rows,
        lose_a_loss,
        halve_a_norm,
        change_the_first_norm,
        keep_the_rate,
        return_twice,
        give_other_weights,
        move_a_weight,
        lose_a_weight,
    ],
    ids=lambda damage: damage.__name__,
)
def test_differences_are_detected(damage, ranks, whole):
    damage(ranks)

    with pytest.raises(AssertionError):
        check_equal(ranks, whole, make_batch())


def test_weights_that_ranks_do_not_give_are_named(ranks, whole):
    lose_a_weight(ranks)

    check_equal(ranks, whole, make_batch(), without=["model.norm.weight"])


@pytest.mark.parametrize("family", FAMILIES)
def test_small_models_of_each_family_are_far_from_uniform(family, tmp_path):
    from rlcore.models.load import load_model

    model = load_model(save_model(family, tmp_path))

    with torch.no_grad():
        spread = model(make_batch([9])["input_ids"][None]).logits.float().std(-1).mean()
    assert float(spread) > 0.5
