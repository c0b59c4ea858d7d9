"""Off-policy correction: hand-worked weights, and their effect on the terms and gradients of several losses."""

import math

import pytest
import torch
from rlcore_algorithms.correction import CorrectionConfig, correct
from rlcore_algorithms.dapo import DAPO
from rlcore_algorithms.gspo import GSPO
from rlcore_algorithms.ppo import DualClipPPO
from rlcore_algorithms.rloo import RLOO

from rlcore.config.build import build
from rlcore.data.batch import Batch
from rlcore.errors import ConfigError
from rlcore.types import TokenOutputs

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


def test_without_a_correction_terms_are_unchanged():
    terms = torch.ones(5)

    assert correct(terms, -1.0 + D, BATCH, CorrectionConfig()) == (terms, {})


def test_weights_are_1_when_engine_and_trainer_agree():
    for weight in ("token", "sequence"):
        terms, _ = correct(torch.ones(5), BATCH["rollout_log_probs"], BATCH, CorrectionConfig(weight=weight))
        assert terms.tolist() == [1.0] * 5


def test_infinite_log_ratios_give_finite_terms():
    far = torch.tensor([0.0, torch.inf, -torch.inf, 0.0, torch.inf])

    terms, metrics = correct(torch.ones(5), far, BATCH, CorrectionConfig(weight="sequence", reject="max_k3"))

    assert terms[SEEN].isfinite().all()
    assert all(values.isfinite().all() for values in metrics.values())


@pytest.mark.parametrize("algorithm", [RLOO, DAPO, GSPO, DualClipPPO], ids=lambda algorithm: algorithm.__name__)
def test_the_weight_of_a_token_scales_its_policy_gradient_but_not_the_entropy_bonus(algorithm):
    columns = {"advantage": [1.0, -2.0]}
    if algorithm is DualClipPPO:
        columns = {"advantage_mean": [0.0, 0.0], "advantage_std": [1.0, 1.0]}
    batch = BATCH.with_rows(**columns).with_tokens(old_log_probs=-1.0 + D)
    if algorithm is DualClipPPO:
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
        build(DAPO.Config, {"correction": settings}, "algorithm")

    assert all(word in str(raised.value) for word in words), str(raised.value)
