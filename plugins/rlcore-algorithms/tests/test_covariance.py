"""Token selection of clip-cov and KL-cov, compared with a plain computation over the whole step."""

import pytest
import torch
from rlcore_algorithms.choose import choose_at_random, choose_largest, covariance

from rlcore.controller.ref import BatchRef
from rlcore.data.batch import Batch
from rlcore.testing import FakeRoles

LENGTHS = [7, 3, 40, 12, 25, 9]


def step():
    generator = torch.Generator().manual_seed(5)
    total = sum(LENGTHS)
    mask = torch.rand(total, generator=generator) < 0.8
    return Batch.of(
        lengths=LENGTHS,
        tokens={
            "loss_mask": mask,
            "old_log_probs": torch.where(mask, -3 * torch.rand(total, generator=generator), 50.0),
            "input_ids": torch.arange(total),
        },
        rows={
            "sample_id": [4, 9, 2, 7, 11, 3],
            "advantage": torch.randn(6, generator=generator),
            "num_loss_tokens": torch.tensor([int(part.sum()) for part in mask.split(LENGTHS)]),
        },
    )


def choose(how, batch, *settings):
    """Return the token column `chosen`; the rows are in a store, as in a run."""
    roles = FakeRoles(["actor"])
    return how(roles, BatchRef.publish(batch, roles.store), "advantage", *settings).local()["chosen"]


def by_hand(batch):
    """Compute the covariances of the loss tokens in float64, with the paper's formula."""
    mask = batch["loss_mask"]
    log_probs = batch["old_log_probs"][mask].double()
    advantages = batch.per_token("advantage")[mask].double()
    return (log_probs - log_probs.mean()) * (advantages - advantages.mean())


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
def test_kl_cov_chooses_the_tokens_with_the_largest_covariance(share):
    batch = step()
    cov = by_hand(batch)
    wanted = max(1, int(share * len(cov)))

    chosen = choose(choose_largest, batch, share)

    assert not chosen[~batch["loss_mask"]].any()
    found = chosen[batch["loss_mask"]]
    assert int(found.sum()) == wanted
    assert float(cov[found].min()) > float(cov[~found].max())


def test_clip_cov_chooses_about_the_share_of_all_tokens_among_those_within_the_bounds():
    batch = step()
    cov = by_hand(batch)
    inside = (cov >= 0.1) & (cov <= 0.8)
    counts = []
    for number in range(40):
        chosen = choose(choose_at_random, batch, 0.1, (0.1, 0.8), number)
        found = chosen[batch["loss_mask"]]
        assert not chosen[~batch["loss_mask"]].any()
        assert not found[~inside].any()
        counts.append(int(found.sum()))

    # 0.1 of all loss tokens on average; the standard deviation of the mean of 40 repetitions is below 0.5
    assert sum(counts) / 40 == pytest.approx(0.1 * len(cov), abs=1.5)
    assert len(set(counts)) > 3


@pytest.mark.parametrize("how", [choose_largest, choose_at_random])
def test_the_choice_does_not_depend_on_the_order_of_the_rows(how):
    batch, order = step(), [3, 0, 5, 2, 1, 4]
    more = [(-1.0, 1.0), 3] if how is choose_at_random else []

    plain = choose(how, batch, 0.2, *more)
    moved = choose(how, batch.take(order), 0.2, *more)

    assert plain.any()
    assert torch.equal(batch.with_tokens(chosen=plain).take(order)["chosen"], moved)


@pytest.mark.parametrize("rows", [[], [1]])
def test_no_token_is_chosen_from_an_empty_batch_or_a_single_row(rows):
    """The tokens of one row share one advantage, so all have the same covariance and none is the largest."""
    batch = step().take(rows)

    assert not choose(choose_largest, batch, 0.01).any()
    assert len(choose(choose_at_random, batch, 0.01, (1.0, 5.0), 0)) == batch.num_tokens


def test_the_covariance_of_a_token_is_the_product_of_its_distances_from_the_means():
    batch = Batch.of(lengths=[2], tokens={"old_log_probs": [-1.0, -3.0]}, rows={"advantage": [0.5]})

    # (-1 + 2) · (0.5 - 0.2), (-3 + 2) · 0.3
    assert covariance(batch, "advantage", (-2.0, 0.2)).tolist() == pytest.approx([0.3, -0.3])


def test_different_tokens_are_chosen_in_identical_samples():
    rows = {"advantage": [1.0, 1.0, -1.0], "sample_id": [1, 2, 3], "num_loss_tokens": [60, 60, 60]}
    columns = {"loss_mask": [True] * 180, "old_log_probs": [-0.5, -1.5] * 60 + [-1.0] * 60}
    batch = Batch.of(lengths=[60, 60, 60], tokens=columns, rows=rows)

    one, two, _ = choose(choose_at_random, batch, 0.2, (-9.0, 9.0), 0).split(60)

    assert one.any() and two.any()
    assert not torch.equal(one, two)
