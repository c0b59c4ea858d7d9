"""Off-policy correction: hand-worked weights, and their effect on the terms and gradients of several losses."""

import math

import pytest
import torch

from rlcore.algorithms.correction import CorrectionConfig, correct, with_effective_size
from rlcore.algorithms.grpo import GRPO
from rlcore.algorithms.ppo import PPO
from rlcore.config.build import build
from rlcore.data.batch import Batch
from rlcore.errors import ConfigError
from rlcore.types import Mean, TokenOutputs

LOG2 = math.log(2)
# log-ratio of trainer and engine: after a prompt of one token, row 1 has log 4 and -log 2, row 2 has log 2
D = torch.tensor([9.0, 2 * LOG2, -LOG2, 9.0, LOG2])
BATCH = Batch.of(
    lengths=[3, 2],
    tokens={"loss_mask": [False, True, True, False, True], "rollout_log_probs": torch.full((5,), -1.0)},
)
SEEN = BATCH["loss_mask"]


def weights(**settings):
    """Return the weights of the three loss tokens, and the metrics."""
    terms, metrics = correct(torch.ones(5), -1.0 + D, BATCH, CorrectionConfig(**settings))
    return terms[SEEN].tolist(), metrics


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        pytest.param({"weight": "token", "high": 10.0}, [4, 0.5, 2], id="token"),
        pytest.param({"weight": "token", "high": 2.0}, [2, 0.5, 2], id="token-truncated"),
        pytest.param({"weight": "token", "high": 2.5, "beyond": "mask"}, [0, 0.5, 2], id="token-masked"),
        pytest.param({"weight": "token", "low": 0.8, "high": 2.5, "beyond": "mask"}, [0, 0, 2], id="band"),
        pytest.param({"weight": "token", "low": 0.8, "high": 2.5}, [2.5, 0.8, 2], id="truncated-on-both-sides"),
        # the product over row 1 is 4 · 1/2
        pytest.param({"weight": "sequence", "high": 10.0}, [2, 2, 2], id="sequence"),
        pytest.param({"weight": "sequence", "high": 1.5}, [1.5, 1.5, 1.5], id="sequence-truncated"),
        pytest.param({"weight": "sequence", "high": 1.5, "beyond": "mask"}, [0, 0, 0], id="sequence-masked"),
        # means of the log-ratio: log 2 / 2 = 0.35 and log 2 = 0.69
        pytest.param({"reject": "mean_k1", "reject_above": 0.5}, [1, 1, 0], id="rejected-by-k1"),
        # k3 = exp(d) - 1 - d: 1.614 and 0.193, mean 0.903; 0.307
        pytest.param({"reject": "mean_k3", "reject_above": 0.8}, [0, 0, 1], id="rejected-by-k3"),
        pytest.param({"reject": "mean_k3", "reject_above": 1.0}, [1, 1, 1], id="none-rejected"),
        pytest.param({"reject": "max_k3", "reject_above": 1.0}, [0, 0, 1], id="rejected-by-its-worst-token"),
        pytest.param(
            {"weight": "token", "high": 10.0, "reject": "max_k3", "reject_above": 0.5},
            [0, 0, 2],
            id="weighted-and-rejected",
        ),
    ],
)
def test_weights_of_a_hand_worked_batch(settings, wanted):
    assert weights(**settings)[0] == pytest.approx(wanted, abs=1e-6)


def test_a_negative_log_ratio_is_rejected_like_a_positive_one():
    terms, _ = correct(torch.ones(5), -1.0 - D, BATCH, CorrectionConfig(reject="mean_k1", reject_above=0.5))

    assert terms[SEEN].tolist() == [1, 1, 0]


def test_metrics_report_divergence_weights_and_rejections():
    _, metrics = weights(weight="token", high=2.5, beyond="mask", reject="mean_k1", reject_above=0.5)

    # k3 = exp(d) - 1 - d: 4 - 1 - 2 log 2, 1/2 - 1 + log 2, 2 - 1 - log 2
    assert metrics["correction/k3"][SEEN].tolist() == pytest.approx([3 - 2 * LOG2, -0.5 + LOG2, 1 - LOG2])
    assert metrics["correction/outside"][SEEN].tolist() == [1, 0, 0]
    assert metrics["correction/rejected"].tolist() == [0, 1]
    assert metrics["correction/weight"][SEEN].tolist() == pytest.approx([0, 0.5, 0])
    assert metrics["correction/weight_squared"][SEEN].tolist() == pytest.approx([0, 0.25, 0])


def test_without_a_correction_terms_are_unchanged():
    terms = torch.ones(5)

    assert correct(terms, -1.0 + D, BATCH, CorrectionConfig()) == (terms, {})


def test_weights_are_1_when_engine_and_trainer_agree():
    for weight in ("token", "sequence"):
        terms, _ = correct(torch.ones(5), BATCH["rollout_log_probs"], BATCH, CorrectionConfig(weight=weight))
        assert terms.tolist() == [1.0] * 5


def test_the_effective_size_is_that_of_all_tokens_of_a_step():
    one = {"actor/correction/weight": Mean(4.0, 1.0), "actor/correction/weight_squared": Mean(16.0, 1.0)}
    others = {"actor/correction/weight": Mean(2.5, 2.0), "actor/correction/weight_squared": Mean(4.25, 2.0)}
    merged = {name: mean + others[name] for name, mean in one.items()}

    found = {name: mean.value for name, mean in with_effective_size({**merged, "actor/loss": Mean(1.0)}).items()}

    # weights 4, 1/2 and 2: (6.5)² / (3 · 20.25)
    assert found["actor/correction/effective_size"] == pytest.approx(42.25 / 60.75)
    assert sorted(found) == ["actor/correction/effective_size", "actor/correction/weight", "actor/loss"]


def test_weights_that_are_all_0_have_no_effective_size():
    metrics = {"actor/correction/weight": Mean(0.0, 3.0), "actor/correction/weight_squared": Mean(0.0, 3.0)}

    assert with_effective_size(metrics)["actor/correction/effective_size"].value == 0.0


def corrected(**settings):
    """Return GRPO with two optimizer steps, so that the new policy differs from the one before the update."""
    return GRPO(GRPO.Config(minibatches=2, correction=CorrectionConfig(**settings)))


def test_token_weights_give_decoupled_ppo():
    new = -1.0 + D + torch.tensor([0.0, 1.5, 0.5, 0.0, 1.1]).clamp(min=1e-9).log()
    batch = BATCH.with_rows(advantage=[1.0, -2.0]).with_tokens(old_log_probs=-1.0 + D)

    terms = corrected(weight="token", high=10.0).loss(TokenOutputs(log_probs=new, entropy=new * 0), batch).terms

    # w · min(u A, clip(u) A):  4 · min(1.5, 1.2),  1/2 · min(0.5, 0.8),  2 · min(-2.2, -2.2)
    assert terms[SEEN].tolist() == pytest.approx([-4.8, -0.25, 4.4])


@pytest.mark.parametrize(("beyond", "bounded"), [("truncate", 3.0), ("mask", 0.0)])
def test_the_gradient_is_that_of_ratios_to_the_sampling_policy(beyond, bounded):
    generator = torch.Generator().manual_seed(0)
    sampling, before, start = (torch.randn(40, generator=generator) * 0.5 for _ in range(3))
    advantage = torch.randn(8, generator=generator)
    columns = {"loss_mask": [True] * 40, "rollout_log_probs": sampling, "old_log_probs": before}
    batch = Batch.of(lengths=[5] * 8, tokens=columns, rows={"advantage": advantage})
    new = start.clone().requires_grad_()
    by_hand = start.clone().requires_grad_()

    algorithm = corrected(weight="token", high=3.0, beyond=beyond)
    algorithm.loss(TokenOutputs(log_probs=new, entropy=start * 0), batch).terms.sum().backward()
    a, weight = advantage.repeat_interleave(5), (before - sampling).exp()
    plain, clipped = (by_hand - sampling).exp() * a, weight * (by_hand - before).exp().clamp(0.8, 1.2) * a
    scale = torch.where(weight > 3.0, bounded / weight, 1.0)
    (-scale * torch.minimum(plain, clipped)).sum().backward()

    assert int((weight > 3.0).sum()) >= 3
    torch.testing.assert_close(new.grad, by_hand.grad)


@pytest.mark.parametrize("algorithm", [GRPO, PPO])
def test_an_algorithm_says_if_it_corrects_for_older_weights(algorithm):
    settings = [{}, {"weight": "token"}, {"weight": "sequence"}, {"reject": "mean_k3"}]
    made = [algorithm(algorithm.Config(correction=CorrectionConfig(**it))) for it in settings]

    assert [it.corrects for it in made] == [False, True, True, False]
    assert ["rollout_log_probs" in it.reads()["actor"] for it in made] == [False, True, True, True]


def test_infinite_log_ratios_give_finite_terms():
    far = torch.tensor([0.0, torch.inf, -torch.inf, 0.0, torch.inf])

    terms, metrics = correct(torch.ones(5), far, BATCH, CorrectionConfig(weight="sequence", reject="max_k3"))

    assert terms[SEEN].isfinite().all()
    assert all(values.isfinite().all() for values in metrics.values())


@pytest.mark.parametrize("algorithm", [GRPO, PPO])
def test_the_weight_of_a_token_scales_its_policy_gradient_but_not_the_entropy_bonus(algorithm):
    columns = {"advantage": [1.0, -2.0]}
    if algorithm is PPO:
        columns = {"advantage_mean": [0.0, 0.0], "advantage_std": [1.0, 1.0]}
    batch = BATCH.with_rows(**columns).with_tokens(old_log_probs=-1.0 + D)
    if algorithm is PPO:
        batch = batch.with_tokens(advantages=torch.tensor([0.0, 1.0, 1.0, 0.0, -2.0]))
    gradients = []
    for correction in (CorrectionConfig(), CorrectionConfig(weight="token", high=10.0)):
        log_probs = (-1.0 + D).requires_grad_()
        entropy = torch.ones(5, requires_grad=True)
        made = algorithm(algorithm.Config(minibatches=2, entropy_coefficient=0.1, correction=correction))
        terms = made.loss(TokenOutputs(log_probs=log_probs, entropy=entropy), batch).terms
        gradients.append(torch.autograd.grad(terms[SEEN].sum(), [log_probs, entropy]))

    (plain, bonus), (weighted, same_bonus) = gradients
    assert (weighted / plain)[SEEN].tolist() == pytest.approx([4, 0.5, 2], abs=1e-5)
    assert torch.equal(bonus, same_bonus)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"low": -1.0}, ["algorithm.correction.low", "0 or more"]),
        ({"low": 3.0}, ["algorithm.correction.high", "more than low=3.0"]),
        ({"reject": "mean_k1", "reject_above": 0.0}, ["algorithm.correction.reject_above", "more than 0"]),
        ({"high": 5.0, "beyond": "mask"}, ["algorithm.correction.beyond", "weight=none ignores it"]),
        ({"weight": "token", "reject_above": 0.5}, ["algorithm.correction.reject_above", "reject=none"]),
        ({"weight": "tokens"}, ["algorithm.correction.weight", "token, sequence"]),
    ],
)
def test_settings_without_an_effect_are_refused(settings, words):
    with pytest.raises(ConfigError) as raised:
        build(GRPO.Config, {"correction": settings}, "algorithm")

    assert all(word in str(raised.value) for word in words), str(raised.value)
