"""Losses: hand-worked tables, comparison of gradients with finite differences, and averages of terms."""

import math

import pytest
import torch

from rlcore.algorithms.losses import clipped_policy_loss, clipped_value_loss
from rlcore.data.batch import Batch
from rlcore.types import Counts, LossTerms
from rlcore.workers.averaging import count, reduce_metrics, reduce_terms


def policy(ratio, advantage, *, clip_low=0.2, clip_high=0.2, dual_clip=0.0):
    """Compute the loss of one token whose probability rose by the factor `ratio`, and d loss / d log p."""
    log_prob = torch.tensor([math.log(ratio) - 1.5], dtype=torch.float64, requires_grad=True)
    old, advantages = torch.tensor([-1.5], dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64)
    loss = clipped_policy_loss(log_prob, old, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    (gradient,) = torch.autograd.grad(loss.terms.sum(), log_prob)
    return loss.terms.item(), gradient.item(), loss.clipped.item()


# d(-ratio · A) / d log p = -ratio · A, as d ratio / d log p = ratio
@pytest.mark.parametrize(
    ("ratio", "advantage", "options", "term", "gradient", "clipped"),
    [
        pytest.param(1.0, 2.0, {}, -2.0, -2.0, 0, id="on-policy"),
        pytest.param(1.1, 2.0, {}, -2.2, -2.2, 0, id="inside"),
        pytest.param(1.5, 2.0, {}, -2.4, 0.0, 1, id="positive-advantage-and-high-ratio-is-clipped"),
        pytest.param(0.5, 2.0, {}, -1.0, -1.0, 0, id="positive-advantage-and-low-ratio-is-not"),
        pytest.param(0.5, -2.0, {}, 1.6, 0.0, 1, id="negative-advantage-and-low-ratio-is-clipped"),
        pytest.param(1.5, -2.0, {}, 3.0, 3.0, 0, id="negative-advantage-and-high-ratio-is-not"),
        pytest.param(1.25, 2.0, {"clip_high": 0.28}, -2.5, -2.5, 0, id="clip-higher-allows-a-higher-ratio"),
        pytest.param(1.5, 2.0, {"clip_high": 0.28}, -2.56, 0.0, 1, id="clip-higher-is-bounded"),
        pytest.param(0.75, -2.0, {"clip_high": 0.28}, 1.6, 0.0, 1, id="clip-higher-does-not-change-the-lower-bound"),
        pytest.param(0.7, -2.0, {"clip_low": 0.4}, 1.4, 1.4, 0, id="clip-low-is-separate"),
        pytest.param(5.0, -2.0, {"dual_clip": 3.0}, 6.0, 0.0, 1, id="dual-clip-bounds-negative-advantages"),
        pytest.param(2.0, -2.0, {"dual_clip": 3.0}, 4.0, 4.0, 0, id="dual-clip-below-its-bound"),
        pytest.param(0.5, 2.0, {"dual_clip": 3.0}, -1.0, -1.0, 0, id="dual-clip-ignores-positive-advantages"),
        pytest.param(0.5, -2.0, {"dual_clip": 3.0}, 1.6, 0.0, 1, id="dual-clip-keeps-the-plain-clip"),
        pytest.param(1.7, 0.0, {"dual_clip": 3.0}, 0.0, 0.0, 0, id="no-advantage"),
    ],
)
def test_policy_loss_of_one_token(ratio, advantage, options, term, gradient, clipped):
    assert policy(ratio, advantage, **options) == pytest.approx((term, gradient, clipped), abs=1e-12)


def test_clip_fraction_counts_exactly_the_tokens_without_gradient():
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(400, generator=generator, dtype=torch.float64)
    log_probs = (old + torch.randn(400, generator=generator, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(400, generator=generator, dtype=torch.float64)

    loss = clipped_policy_loss(log_probs, old, advantages, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    (gradient,) = torch.autograd.grad(loss.terms.sum(), log_probs)

    assert torch.equal(loss.clipped == 1, gradient == 0)
    assert 0.2 < loss.clipped.mean() < 0.8


def test_kl_to_the_old_policy_is_k3_of_the_ratio():
    loss = clipped_policy_loss(
        torch.log(torch.tensor([2.0, 1.0])), torch.zeros(2), torch.ones(2), clip_low=0.2, clip_high=0.2
    )

    assert loss.kl.tolist() == pytest.approx([2 - 1 - math.log(2), 0.0])


@pytest.mark.parametrize("gap", [1e4, math.inf])
def test_policy_loss_is_finite_for_any_distance_between_the_policies(gap):
    log_probs = torch.tensor([0.0, -gap], requires_grad=True)
    loss = clipped_policy_loss(
        log_probs, torch.tensor([-gap, 0.0]), torch.tensor([-1.0, 1.0]), clip_low=0.2, clip_high=0.2
    )

    loss.terms.sum().backward()

    assert loss.terms.isfinite().all()
    assert loss.kl.isfinite().all()
    assert log_probs.grad.isfinite().all()


@pytest.mark.parametrize("dual_clip", [0.0, 3.0])
def test_policy_gradient_agrees_with_finite_differences(dual_clip):
    generator = torch.Generator().manual_seed(1)
    old, noise, advantages = torch.randn(3, 24, generator=generator, dtype=torch.float64)
    log_probs = (old + noise).requires_grad_()

    def loss(x):
        return clipped_policy_loss(x, old, advantages, clip_low=0.2, clip_high=0.3, dual_clip=dual_clip).terms

    assert torch.autograd.gradcheck(loss, log_probs)


@pytest.mark.parametrize(
    ("value", "old", "target", "clip", "term", "gradient", "clipped"),
    [
        pytest.param(1.0, 0.0, 3.0, 0.0, 2.0, -2.0, 0, id="no-clip"),  # 0.5 · (1 - 3)²
        pytest.param(0.1, 0.0, 1.0, 0.2, 0.405, -0.9, 0, id="inside"),
        # moved from 0 to 1, toward 3, clipped to 0.2: 0.5 · (0.2 - 3)² = 3.92, above 0.5 · (1 - 3)² = 2
        pytest.param(1.0, 0.0, 3.0, 0.2, 3.92, 0.0, 1, id="moved-too-far-toward-the-target"),
        # moved away from the target: 0.5 · (1 + 2)² = 4.5 is above 0.5 · (0.2 + 2)²
        pytest.param(1.0, 0.0, -2.0, 0.2, 4.5, 3.0, 0, id="moved-away-is-not-clipped"),
        # clip(1, 2 ± 0.5) = 1.5: 0.5 · 1.5² = 1.125 is above 0.5 · 1²
        pytest.param(1.0, 2.0, 0.0, 0.5, 1.125, 0.0, 1, id="downwards"),
    ],
)
def test_value_loss_of_one_token(value, old, target, clip, term, gradient, clipped):
    values = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    terms, decided = clipped_value_loss(
        values, torch.tensor([old]).double(), torch.tensor([target]).double(), clip=clip
    )

    (slope,) = torch.autograd.grad(terms.sum(), values)

    assert (terms.item(), slope.item(), decided.item()) == pytest.approx((term, gradient, clipped), abs=1e-12)


@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_value_gradient_agrees_with_finite_differences(clip):
    generator = torch.Generator().manual_seed(2)
    old, noise, targets = torch.randn(3, 24, generator=generator, dtype=torch.float64)

    assert torch.autograd.gradcheck(
        lambda x: clipped_value_loss(x, old, targets, clip=clip)[0], (old + noise).requires_grad_()
    )


def three_rows():
    """Make rows with the loss tokens 1 | 2, 4, 6 | none; the other tokens belong to prompts."""
    return Batch.of(
        lengths=[2, 4, 1],
        tokens={
            "loss_mask": [False, True, False, True, True, True, False],
            "term": torch.tensor([math.nan, 1.0, 99.0, 2.0, 4.0, 6.0, math.inf]),
        },
    )


@pytest.mark.parametrize(
    ("average", "expected"),
    [
        ("token-mean", (1 + 2 + 4 + 6) / 4),
        ("seq-mean-token-mean", (1 + (2 + 4 + 6) / 3) / 2),
        ("seq-mean-token-sum", (1 + (2 + 4 + 6)) / 2),
    ],
)
def test_averages_of_token_terms(average, expected):
    batch = three_rows()
    terms = LossTerms(terms=batch["term"], average=average)

    loss = reduce_terms(terms, batch, count(batch.per_row(batch["loss_mask"].long())))

    assert loss.item() == expected


def test_average_of_row_terms():
    batch = Batch.of(lengths=[1, 2], tokens={"loss_mask": [True, True, True]})

    loss = reduce_terms(LossTerms(terms=torch.tensor([1.0, 4.0]), average="row-mean"), batch, Counts(2, 3))

    assert loss.item() == 2.5


@pytest.mark.parametrize("average", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_the_gradient_of_a_batch_is_the_sum_of_the_gradients_of_its_parts(average):
    batch = three_rows().with_tokens(term=torch.tensor([0.0, 1.0, 0.0, 2.0, 4.0, 6.0, 0.0]))
    counts = count(batch.per_row(batch["loss_mask"].long()))

    def gradient(parts):
        term = batch["term"].clone().requires_grad_()
        pieces = batch.with_tokens(term=term).split(parts)
        sum(reduce_terms(LossTerms(terms=b["term"] ** 2, average=average), b, counts) for b in pieces).backward()
        return term.grad

    assert torch.allclose(gradient([1, 1, 1]), gradient([3]), rtol=1e-6)
    assert torch.allclose(gradient([0, 1, 2]), gradient([3]), rtol=1e-6)


def test_metrics_are_means_over_loss_tokens_or_rows():
    batch = three_rows()

    metrics = reduce_metrics({"term": batch["term"], "row": torch.tensor([1.0, 2.0, 6.0])}, batch)

    assert (metrics["term"].value, metrics["term"].weight) == (13 / 4, 4)
    assert (metrics["row"].value, metrics["row"].weight) == (3, 3)
