"""Averages of loss terms: hand-worked means, and independence of how the mini-batch is split."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlcore.data.batch import Batch
from rlcore.data.shares import unit_rows
from rlcore.types import Counts, LossTerms, Mean, merge_metrics
from rlcore.workers.averaging import count, reduce_metrics, reduce_terms

AVERAGES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "row-mean"]


def masked(lengths, mask, **rows) -> Batch:
    mask = torch.tensor(mask, dtype=torch.bool)
    return Batch.of(lengths=lengths, tokens={"input_ids": torch.zeros(len(mask)).long(), "loss_mask": mask}, rows=rows)


BATCH = masked([3, 2, 2], [False, True, True, False, True, False, False])
TERMS = torch.tensor([100.0, 1.0, 2.0, 100.0, 6.0, 100.0, 100.0])
"""Loss tokens: 1 and 2 in the first row, 6 in the second, none in the third."""


@pytest.mark.parametrize(
    ("average", "terms", "expected"),
    [
        ("token-mean", TERMS, 3.0),  # (1 + 2 + 6) / 3 tokens
        ("seq-mean-token-mean", TERMS, 3.75),  # (1.5 + 6) / 2 rows that have loss tokens
        ("seq-mean-token-sum", TERMS, 4.5),  # (3 + 6) / 2
        ("row-mean", torch.tensor([2.0, 4.0, 100.0]), 3.0),  # (2 + 4) / 2
    ],
)
def test_average_of_a_hand_worked_batch(average, terms, expected):
    counts = count(torch.tensor([2, 1, 0]))

    assert counts == Counts(rows=2, tokens=3, units=2)
    assert float(reduce_terms(LossTerms(terms=terms, average=average), BATCH, counts)) == pytest.approx(expected)


@pytest.mark.parametrize("average", AVERAGES[:3])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_terms_outside_the_mask_affect_neither_loss_nor_gradient(average, bad):
    terms = torch.where(BATCH["loss_mask"], TERMS, torch.full_like(TERMS, bad)).requires_grad_()
    clean = TERMS.clone().requires_grad_()
    counts = Counts(rows=2, tokens=3)

    found = reduce_terms(LossTerms(terms=terms, average=average), BATCH, counts)
    expected = reduce_terms(LossTerms(terms=clean, average=average), BATCH, counts)
    found.backward()
    expected.backward()

    assert float(found.detach()) == float(expected.detach())
    assert torch.equal(terms.grad, clean.grad)
    assert terms.grad[~BATCH["loss_mask"]].tolist() == [0.0] * 4


def test_row_terms_of_rows_without_loss_tokens_affect_neither_loss_nor_gradient():
    terms = torch.tensor([2.0, 4.0, float("nan")], requires_grad=True)

    loss = reduce_terms(LossTerms(terms=terms, average="row-mean"), BATCH, Counts(rows=2, tokens=3))
    loss.backward()

    assert float(loss.detach()) == 3.0
    assert terms.grad.tolist() == [0.5, 0.5, 0.0]


row = st.lists(st.booleans(), min_size=0, max_size=6)


@given(st.lists(row, min_size=1, max_size=8), st.sampled_from(AVERAGES), st.randoms(use_true_random=False))
def test_losses_of_parts_sum_to_the_loss_of_the_batch_for_any_split_and_order(mask, average, random):
    lengths = [len(seen) for seen in mask]
    batch = masked(lengths, [one for seen in mask for one in seen])
    batch = batch.with_rows(number=torch.arange(len(batch))).with_tokens(term=torch.rand(batch.num_tokens).double())
    per_row = torch.rand(len(batch)).double()
    counts = count(torch.tensor([sum(seen) for seen in mask]))

    def loss(part):
        terms = per_row[part["number"]] if average == "row-mean" else part["term"]
        return float(reduce_terms(LossTerms(terms=terms, average=average), part, counts))

    order = random.sample(range(len(batch)), len(batch))
    cut = random.randint(0, len(order))
    parts = [loss(batch.take(order[:cut])), loss(batch.take(order[cut:]))]

    assert sum(parts) == pytest.approx(loss(batch), rel=1e-12, abs=1e-12)


# the first two rows are a unit, the third row without loss tokens is one by itself
IN_UNITS = BATCH.with_rows(unit_id=torch.tensor([4, 4, 9]))


def test_terms_of_units_are_averaged_over_units_with_loss_tokens():
    counts = count(torch.tensor([2, 1, 0]), IN_UNITS.unit_sizes())
    terms = torch.tensor([5.0, float("nan")], requires_grad=True)

    loss = reduce_terms(LossTerms(terms=terms, average="unit-mean"), IN_UNITS, counts)
    loss.backward()

    assert counts == Counts(rows=2, tokens=3, units=1)
    assert float(loss.detach()) == 5.0
    assert terms.grad.tolist() == [1.0, 0.0]


def test_without_units_every_row_is_a_unit():
    counts, terms = count(torch.tensor([2, 1, 0])), torch.tensor([2.0, 4.0, 100.0])

    found = [
        reduce_terms(LossTerms(terms=terms, average=average), BATCH, counts) for average in ("row-mean", "unit-mean")
    ]

    assert found == [3.0, 3.0]


@given(st.lists(st.lists(row, min_size=1, max_size=3), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_losses_of_whole_units_sum_to_the_loss_of_the_batch_for_any_split_and_order(units, random):
    mask = [seen for unit in units for seen in unit]
    sizes = np.array([len(unit) for unit in units])
    batch = masked([len(seen) for seen in mask], [one for seen in mask for one in seen])
    batch = batch.with_rows(unit_id=np.repeat(np.arange(len(units)), sizes))
    per_unit = torch.rand(len(units)).double()
    counts = count(torch.tensor([sum(seen) for seen in mask]), sizes)

    def loss(units_of_part):
        part = batch.take(unit_rows(np.array(units_of_part, dtype=np.int64), sizes))
        return float(reduce_terms(LossTerms(terms=per_unit[units_of_part], average="unit-mean"), part, counts))

    order = random.sample(range(len(units)), len(units))
    cut = random.randint(0, len(order))

    assert loss(order[:cut]) + loss(order[cut:]) == pytest.approx(loss(list(range(len(units)))), rel=1e-12, abs=1e-12)


def test_mini_batch_without_loss_tokens_has_a_loss_of_zero():
    batch = masked([2], [False, False])

    for average in AVERAGES[:3]:
        terms = LossTerms(terms=torch.full((2,), float("nan")), average=average)
        assert float(reduce_terms(terms, batch, count(torch.tensor([0])))) == 0.0


@pytest.mark.parametrize(
    ("terms", "average", "message"),
    [
        (torch.zeros(3), "token-mean", r"average=token-mean needs one term per token, \[7\]; .* returned \(3,\)"),
        (torch.zeros(7), "row-mean", r"average=row-mean needs one term per row, \[3\]; .* returned \(7,\)"),
        (torch.zeros(2), "unit-mean", r"average=unit-mean needs one term per unit, \[3\]; .* returned \(2,\)"),
        (torch.zeros(7, 1), "token-mean", r"returned \(7, 1\)"),
        (torch.zeros(()), "row-mean", r"returned \(\)"),
        (torch.zeros(7), "mean", "average 'mean' is not one of token-mean, seq-mean-token-mean"),
    ],
    ids=["rows for tokens", "tokens for rows", "pairs for rows", "two dimensions", "a scalar", "unknown average"],
)
def test_terms_that_cannot_be_averaged_are_refused(terms, average, message):
    with pytest.raises(ValueError, match=message):
        reduce_terms(LossTerms(terms=terms, average=average), BATCH, Counts(rows=2, tokens=3))


def test_metrics_are_mergeable_means_over_loss_tokens_or_rows():
    metrics = {"per_token": TERMS.clone().requires_grad_(), "per_row": torch.tensor([1.0, 2.0, 6.0])}

    reduced = reduce_metrics(metrics, BATCH)
    merged = merge_metrics([reduced, {"per_row": Mean(11.0, 1.0)}])

    assert reduced == {"per_token": Mean(9.0, 3.0), "per_row": Mean(9.0, 3.0)}
    assert merged["per_row"].value == 5.0


def test_metrics_of_units_are_means_over_units():
    assert reduce_metrics({"margin": torch.tensor([3.0, 1.0])}, IN_UNITS) == {"margin": Mean(4.0, 2.0)}


def test_metric_of_another_shape_is_refused():
    with pytest.raises(
        ValueError, match=r"metric 'odd' has shape \(5,\); give one value per token, per row or per unit"
    ):
        reduce_metrics({"odd": torch.zeros(5)}, BATCH)
