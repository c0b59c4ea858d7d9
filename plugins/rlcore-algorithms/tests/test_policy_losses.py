"""Losses: hand-worked tokens, the published formulas on padded float64 tables, and gradients."""

import math

import pytest
import torch
from rlcore_algorithms.cispo import CISPO
from rlcore_algorithms.covariance import ClipCov, KLCov
from rlcore_algorithms.dppo import DPPO
from rlcore_algorithms.gmpo import GMPO
from rlcore_algorithms.gpg import GPG
from rlcore_algorithms.gspo import GSPO
from rlcore_algorithms.gvpo import GVPO
from rlcore_algorithms.sapo import SAPO

from rlcore.data.batch import Batch
from rlcore.types import LossTerms, TokenOutputs
from rlcore.workers.averaging import count, reduce_terms

WIDE = {"clip_low": 0.2, "clip_high": 0.28}


def token(algorithm, ratio, advantage, *, chosen=False, **settings):
    """Compute the term of one token whose probability rose by the factor `ratio`, and d term / d log p."""
    log_prob = torch.tensor([0.0, math.log(ratio) - 1.5], dtype=torch.float64, requires_grad=True)
    batch = Batch.of(
        lengths=[2],
        tokens={"loss_mask": [False, True], "chosen": torch.tensor([False, chosen])},
        rows={"advantage": torch.tensor([advantage], dtype=torch.float64)},
    )
    old = torch.tensor([0.0, -1.5], dtype=torch.float64)
    terms, _ = algorithm(algorithm.Config(**settings)).policy_loss(log_prob, old, batch)
    (gradient,) = torch.autograd.grad(terms[1], log_prob)
    return terms[1].item(), gradient[1].item()


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


# d ratio / d log p = ratio. A response of one token has the ratio of that token.
@pytest.mark.parametrize(
    ("algorithm", "ratio", "advantage", "settings", "term", "gradient"),
    [
        pytest.param(GSPO, 1.1, 2.0, WIDE, -2.2, -2.2, id="gspo-inside"),
        pytest.param(GSPO, 1.5, 2.0, WIDE, -2.56, 0.0, id="gspo-good-and-above-is-clipped"),
        pytest.param(GSPO, 1.5, -2.0, WIDE, 3.0, 3.0, id="gspo-bad-and-above-is-not"),
        pytest.param(GSPO, 1.001, 2.0, {}, -2.0 * 1.0004, 0.0, id="gspo-its-own-bounds-are-narrow"),
        pytest.param(GMPO, 1.4, 2.0, {}, -2.8, -2.8, id="gmpo-inside"),
        pytest.param(GMPO, 2.0, 2.0, {}, -2 * math.exp(0.4), 0.0, id="gmpo-good-and-above-is-clipped"),
        pytest.param(GMPO, 0.5, 2.0, {}, -1.0, -1.0, id="gmpo-good-and-below-is-not"),
        pytest.param(GMPO, 0.5, -2.0, {}, 2 * math.exp(-0.4), 0.0, id="gmpo-bad-and-below-is-clipped"),
        pytest.param(GMPO, 2.0, -2.0, {}, 4.0, 4.0, id="gmpo-bad-and-above-is-not"),
        # log p = log 2 - 1.5; the weight 1.28 is a constant
        pytest.param(CISPO, 2.0, 2.0, {}, -1.28 * 2 * (math.log(2) - 1.5), -2.56, id="cispo-bounded-but-not-clipped"),
        pytest.param(CISPO, 0.5, -2.0, {}, 0.5 * 2 * (math.log(0.5) - 1.5), 1.0, id="cispo-has-no-lower-bound"),
        pytest.param(
            CISPO, 0.5, -2.0, {"clip_low": 0.2}, 1.6 * (math.log(0.5) - 1.5), 1.6, id="cispo-with-a-lower-bound"
        ),
        pytest.param(SAPO, 1.0, 2.0, {}, -4.0, -2.0, id="sapo-on-policy-is-the-policy-gradient"),
        # f = 4 sigmoid(0.5), f' = 4 sigmoid(0.5) (1 - sigmoid(0.5)) · ratio
        pytest.param(
            SAPO, 1.5, 1.0, {}, -4 * sigmoid(0.5), -4 * sigmoid(0.5) * sigmoid(-0.5) * 1.5, id="sapo-fades-above"
        ),
        pytest.param(
            SAPO,
            0.5,
            -1.0,
            {"tau_negative": 2.0},
            4 / 2 * sigmoid(-1.0),
            4 * sigmoid(-1.0) * sigmoid(1.0) * 0.5,
            id="sapo-has-another-temperature-for-bad",
        ),
        # p_old = exp(-1.5) = 0.223: |p - p_old| is 0.022, 0.223 and 0.156
        pytest.param(DPPO, 1.1, 2.0, {}, -2.2, -2.2, id="dppo-inside"),
        pytest.param(DPPO, 2.0, 2.0, {}, -4.0, 0.0, id="dppo-good-and-far-above-is-masked"),
        pytest.param(DPPO, 2.0, -2.0, {}, 4.0, 4.0, id="dppo-bad-and-above-is-not"),
        pytest.param(DPPO, 0.3, -2.0, {}, 0.6, 0.0, id="dppo-bad-and-far-below-is-masked"),
        pytest.param(DPPO, 0.3, -2.0, {"limit": 0.16}, 0.6, 0.6, id="dppo-within-another-limit"),
        # 0.223 · log(1/2) + 0.777 · log(0.777 / 0.554) = 0.108
        pytest.param(DPPO, 2.0, 2.0, {"divergence": "kl", "limit": 0.107}, -4.0, 0.0, id="dppo-masks-by-kl"),
        pytest.param(DPPO, 2.0, 2.0, {"divergence": "kl", "limit": 0.11}, -4.0, -4.0, id="dppo-within-the-kl"),
        pytest.param(GPG, 3.0, 2.0, {}, -2 * (math.log(3) - 1.5), -2.0, id="gpg-has-no-ratio"),
        pytest.param(ClipCov, 1.1, 2.0, {}, -2.2, -2.2, id="clip-cov-leaves-others"),
        pytest.param(ClipCov, 1.1, 2.0, {"chosen": True}, -2.2, 0.0, id="clip-cov-removes-the-gradient-of-the-chosen"),
        pytest.param(KLCov, 2.0, 1.0, {}, -2.0, -2.0, id="kl-cov-does-not-clip-others"),
        # -2 + 0.5 · log 2, and the gradient of |log ratio| is 1
        pytest.param(
            KLCov,
            2.0,
            1.0,
            {"chosen": True, "penalty": 0.5},
            -2 + 0.5 * math.log(2),
            -1.5,
            id="kl-cov-penalizes-the-chosen",
        ),
        pytest.param(
            KLCov,
            0.5,
            1.0,
            {"chosen": True, "penalty": 0.5},
            -0.5 + 0.5 * math.log(2),
            -1.0,
            id="kl-cov-penalizes-both-directions",
        ),
    ],
)
def test_the_loss_of_one_token(algorithm, ratio, advantage, settings, term, gradient):
    if algorithm in (ClipCov, KLCov):
        settings = {"share": 0.5, **settings}

    assert token(algorithm, ratio, advantage, **settings) == pytest.approx((term, gradient), abs=1e-9)


P, T = 6, 9


def table():
    """Make padded [P, T] log-probs, old log-probs and mask, and [P] advantages, as in other implementations."""
    generator = torch.Generator().manual_seed(11)
    lengths = torch.tensor([9, 1, 4, 7, 3, 5])
    mask = torch.arange(T)[None] < lengths[:, None]
    old = -3 * torch.rand(P, T, generator=generator, dtype=torch.float64)
    new = old + 0.5 * torch.randn(P, T, generator=generator, dtype=torch.float64)
    advantages = torch.randn(P, generator=generator, dtype=torch.float64)
    return new, old, mask, advantages, lengths


def gspo(new, old, mask, advantages, lengths):
    """Compute arXiv 2507.18071, eq. 5 to 7, with one ratio per response."""
    ratio = (((new - old) * mask).sum(1) / lengths).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - 0.2, 1 + 0.28) * advantages).mean()


def gmpo(new, old, mask, advantages, lengths):
    """Compute arXiv 2507.20673, eq. 5, in verl's form with signs."""
    sign = advantages.sign()[:, None]
    difference = new - old
    smallest = torch.minimum(sign * difference, sign * difference.clamp(-0.4, 0.4))
    ratio = ((sign * smallest * mask).sum(1) / lengths).exp()
    return (-advantages * ratio).mean()


def sapo(new, old, mask, advantages, lengths):
    """Compute arXiv 2511.20347, eq. 5 and 6, as in TRL: sigmoid(tau (r - 1)) · 4 / tau."""
    advantages = advantages[:, None]
    tau = torch.where(advantages > 0, 1.0, 1.05)
    per_token = -torch.sigmoid(tau * ((new - old).exp() - 1)) * 4 / tau * advantages
    return ((per_token * mask).sum(1) / lengths).mean()


def cispo(new, old, mask, advantages, lengths):
    """Compute arXiv 2506.13585, eq. 4, as in TRL: min(r, 1 + eps) without gradient."""
    weight = (new - old).exp().clamp(max=1.28).detach()
    return (-weight * advantages[:, None] * new * mask).sum() / mask.sum()


def gpg(new, old, mask, advantages, lengths):
    return (-new * advantages[:, None] * mask).sum() / mask.sum()


@pytest.mark.parametrize(
    ("algorithm", "settings", "formula"),
    [(GSPO, WIDE, gspo), (GMPO, {}, gmpo), (SAPO, {}, sapo), (CISPO, {}, cispo), (GPG, {}, gpg)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_losses_and_gradients_agree_with_the_published_formulas(algorithm, settings, formula):
    new, old, mask, advantages, lengths = table()
    new.requires_grad_()
    wanted = formula(new, old, mask, advantages, lengths)
    (wanted_gradient,) = torch.autograd.grad(wanted, new)

    # the same rows concatenated, each after a prompt of two tokens
    behind = torch.cat([torch.zeros(P, 2, dtype=torch.bool), mask], dim=1)
    there = torch.cat([torch.ones(P, 2, dtype=torch.bool), mask], dim=1)
    flat_new = torch.nn.functional.pad(new.detach(), (2, 0))[there].requires_grad_()
    flat_old = torch.nn.functional.pad(old, (2, 0))[there]
    batch = Batch.of(lengths=lengths + 2, tokens={"loss_mask": behind[there]}, rows={"advantage": advantages})
    made = algorithm(algorithm.Config(**settings))
    terms, _ = made.policy_loss(flat_new, flat_old, batch)
    found = reduce_terms(LossTerms(terms=terms, average=made.config.average), batch, count(lengths))
    (gradient,) = torch.autograd.grad(found, flat_new)

    assert found.item() == pytest.approx(wanted.item(), abs=1e-12)
    assert torch.allclose(gradient[batch["loss_mask"]], wanted_gradient[mask], atol=1e-12)
    assert float(gradient.abs().max()) > 0


@pytest.mark.parametrize("algorithm", [GSPO, GMPO, SAPO, CISPO, GPG], ids=lambda algorithm: algorithm.__name__)
def test_on_policy_every_loss_has_the_gradient_of_reinforce(algorithm):
    new, _, mask, advantages, lengths = table()
    flat = new[mask].requires_grad_()
    batch = Batch.of(
        lengths=lengths, tokens={"loss_mask": torch.ones(len(flat), dtype=torch.bool)}, rows={"advantage": advantages}
    )

    terms, _ = algorithm(algorithm.Config()).policy_loss(flat, flat.detach(), batch)
    (gradient,) = torch.autograd.grad((terms * torch.ones_like(terms)).sum(), flat)

    # in GSPO and GMPO each token has its own gradient, whose mean over the response is the gradient of the sequence
    assert torch.allclose(gradient, -batch.per_token("advantage"), atol=1e-12)


def test_gvpo_is_half_the_variance_of_reward_minus_log_ratio():
    """R - 0.5 · log ratio is 0.9, 0.1 and 0.8: centered 0.3, -0.5, 0.2."""
    log_probs = torch.tensor([0.0, -0.8, 0.0, -0.7, -0.5, -0.4, -0.6], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([0, 1, 0, 1, 1, 1, 1], dtype=torch.bool)
    old = torch.tensor([9.0, -1.0, 9.0, -0.5, -0.5, -0.8, -0.6], dtype=torch.float64)
    batch = Batch.of(
        lengths=[2, 3, 2],
        tokens={"loss_mask": mask, "old_log_probs": old},
        rows={"reward": torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64), "unit_id": [4, 4, 4]},
    )
    algorithm = GVPO(GVPO.Config(beta=0.5, minibatches=2))

    terms = algorithm.loss(TokenOutputs(log_probs=log_probs), batch)
    loss = reduce_terms(terms, batch, count(torch.tensor([1, 2, 2]), batch.unit_sizes()))
    loss.backward()

    assert loss.item() == pytest.approx(0.5 * (0.09 + 0.25 + 0.04) / 2)
    slopes = [-0.5 / 2 * centered for centered in (0.3, -0.5, 0.2)]
    expected = [0, slopes[0], 0, slopes[1], slopes[1], slopes[2], slopes[2]]
    assert log_probs.grad.tolist() == pytest.approx(expected)
