"""KL estimators compared with the exact KL of small distributions, and the controller of the coefficient."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.algorithms.kl import KLConfig, KLController, kl_estimate
from rlcore.errors import ConfigError

ESTIMATORS = ["k1", "k2", "k3"]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # p = 1/2, p_ref = 1/4: r = 1/2
        ("k1", math.log(2)),
        ("k2", math.log(2) ** 2 / 2),
        ("k3", 1 / 2 - 1 + math.log(2)),
    ],
)
def test_estimate_of_one_token(estimator, expected):
    p, ref = torch.log(torch.tensor([0.5, 0.3])), torch.log(torch.tensor([0.25, 0.3]))

    assert kl_estimate(p, ref, estimator).tolist() == pytest.approx([expected, 0.0], abs=1e-7)


logits = st.lists(st.floats(-2, 2), min_size=5, max_size=5)


def distributions(p, ref):
    return (torch.log_softmax(torch.tensor(x, dtype=torch.float64), 0) for x in (p, ref))


@settings(max_examples=50)
@given(logits, logits, st.sampled_from(["k1", "k3"]))
def test_k1_and_k3_are_unbiased(p, ref, estimator):
    log_p, log_ref = distributions(p, ref)
    exact = torch.nn.functional.kl_div(log_ref, log_p, log_target=True, reduction="sum")

    expectation = (log_p.exp() * kl_estimate(log_p, log_ref, estimator)).sum()

    assert expectation.item() == pytest.approx(exact.item(), abs=1e-12)


@settings(max_examples=50)
@given(logits, logits)
def test_k2_and_k3_are_never_negative(p, ref):
    log_p, log_ref = distributions(p, ref)

    assert (kl_estimate(log_p, log_ref, "k2") >= 0).all()
    assert (kl_estimate(log_p, log_ref, "k3") >= 0).all()


def test_k2_is_accurate_for_similar_distributions_and_biased_for_different_ones():
    def bias(distance):
        log_p, log_ref = distributions([0.0, 0.0], [distance, 0.0])
        exact = (log_p.exp() * (log_p - log_ref)).sum()
        return ((log_p.exp() * kl_estimate(log_p, log_ref, "k2")).sum() - exact).item()

    assert abs(bias(0.01)) < 1e-8
    assert abs(bias(3.0)) > 0.1


def test_k3_has_less_variance_than_k1_for_similar_distributions():
    log_p, log_ref = distributions([0.1, -0.1, 0.3], [0.0, 0.1, 0.2])

    def variance(estimator):
        estimate = kl_estimate(log_p, log_ref, estimator)
        mean = (log_p.exp() * estimate).sum()
        return (log_p.exp() * (estimate - mean) ** 2).sum().item()

    assert variance("k3") < variance("k1") / 10


def expected_gradient(p, ref, estimator):
    """Return the mean over tokens sampled from p of d estimate / d logits, without differentiating the sampling."""
    leaf = torch.tensor(p, dtype=torch.float64, requires_grad=True)
    log_p = torch.log_softmax(leaf, 0)
    _, log_ref = distributions(p, ref)
    (log_p.detach().exp() * kl_estimate(log_p, log_ref, estimator)).sum().backward()
    return leaf.grad


def exact_gradient(p, ref, *, reverse):
    """Return the gradient of KL(p || ref), or of KL(ref || p)."""
    leaf = torch.tensor(p, dtype=torch.float64, requires_grad=True)
    log_p = torch.log_softmax(leaf, 0)
    _, log_ref = distributions(p, ref)
    (log_ref.exp() * (log_ref - log_p) if reverse else log_p.exp() * (log_p - log_ref)).sum().backward()
    return leaf.grad


@settings(max_examples=30)
@given(logits, logits)
def test_expected_gradients_match_theory(p, ref):
    # with s = grad log p and E_p[s] = 0:
    # k1: E[s] = 0;  k2: E[(log p - log ref) s] = grad KL(p || ref);  k3: E[(1 - r) s] = -E_ref[s] = grad KL(ref || p)
    assert torch.allclose(expected_gradient(p, ref, "k1"), torch.zeros(5, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(expected_gradient(p, ref, "k2"), exact_gradient(p, ref, reverse=False), atol=1e-12)
    assert torch.allclose(expected_gradient(p, ref, "k3"), exact_gradient(p, ref, reverse=True), atol=1e-12)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_gradients_agree_with_finite_differences(estimator):
    generator = torch.Generator().manual_seed(0)
    log_p, log_ref = torch.randn(2, 16, generator=generator, dtype=torch.float64)

    assert torch.autograd.gradcheck(lambda x: kl_estimate(x, log_ref, estimator), log_p.requires_grad_())


@pytest.mark.parametrize("gap", [-100.0, 100.0])
def test_k3_does_not_overflow(gap):
    log_p = torch.tensor([gap], requires_grad=True)

    estimate = kl_estimate(log_p, torch.zeros(1), "k3")
    estimate.sum().backward()

    assert estimate.isfinite().all()
    assert log_p.grad.isfinite().all()


def test_k3_of_nearly_equal_policies_is_accurate():
    # r - 1 - log r = x - log(1 + x) with x = 1e-4: x²/2 - x³/3 = 4.99967e-9, which r - 1 in float32 would lose
    ref = torch.tensor([math.log1p(1e-4)], dtype=torch.float32)

    assert kl_estimate(torch.zeros(1), ref, "k3").item() == pytest.approx(4.99967e-9, rel=2e-2)


@pytest.mark.parametrize(
    ("kl", "num_samples", "expected"),
    [
        # target 0.1, horizon 1000, coefficient 0.5; error = clip(kl / 0.1 - 1, -0.2, 0.2); 0.5 · (1 + error · n / 1000)
        pytest.param(0.1, 100, 0.5, id="on-target"),
        pytest.param(0.11, 100, 0.5 * 1.01, id="a-little-above"),
        pytest.param(0.095, 200, 0.5 * 0.99, id="a-little-below"),
        pytest.param(9.0, 100, 0.5 * 1.02, id="far-above-is-bounded"),
        pytest.param(0.0, 100, 0.5 * 0.98, id="far-below-is-bounded"),
        pytest.param(9.0, 0, 0.5, id="no-samples"),
    ],
)
def test_adaptive_coefficient_moves_toward_its_target(kl, num_samples, expected):
    config = KLConfig(coefficient=0.5, where="reward", controller="adaptive", target=0.1, horizon=1000.0)
    controller = KLController(config)

    controller.observe(kl, num_samples)

    assert controller.coefficient == pytest.approx(expected)


def test_fixed_coefficient_does_not_change():
    controller = KLController(KLConfig(coefficient=0.5))

    controller.observe(9.0, 1000)

    assert controller.coefficient == 0.5


def test_adaptive_coefficient_survives_a_resume():
    config = KLConfig(coefficient=0.5, where="reward", controller="adaptive")
    first, second = KLController(config), KLController(config)
    first.observe(3.0, 500)

    second.load_state_dict(first.state_dict())

    assert second.coefficient == first.coefficient != 0.5


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"coefficient": -0.1}, "coefficient"),
        ({"coefficient": 0.1, "controller": "adaptive", "where": "loss"}, "where"),
        ({"coefficient": 0.1, "controller": "adaptive", "where": "reward", "target": 0.0}, "target"),
        ({"coefficient": 0.1, "controller": "adaptive", "where": "reward", "horizon": 0.0}, "horizon"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_key(settings, key):
    with pytest.raises(ConfigError, match=rf"^{key}: .*\nType  .*{key}="):
        KLConfig(**settings)
