"""Pairs: one pass has the gradient of the published losses, whatever the micro-batches, and pairs stay whole."""

import math

import pytest
import torch
from rlcore_algorithms.best_of_n import BestOfN
from rlcore_algorithms.dpo import DPO
from rlcore_algorithms.online_dpo import OnlineDPO, best_and_worst
from rlcore_algorithms.orpo import ORPO
from rlcore_algorithms.reward_model import RewardModel, with_score_token
from rlcore_tests.pairs import make_pairs, plain_pair_gradients

from rlcore.backends.local import LocalBackend, LocalConfig
from rlcore.data.batch import Batch
from rlcore.protocols import BackendContext, ModelConfig, OptimizerConfig
from rlcore.testing import FakeRoles
from rlcore.testing.training import save_model
from rlcore.types import Mean, TokenOutputs
from rlcore.workers.averaging import count, reduce_metrics, reduce_terms

BETA = 0.3


def test_the_reward_model_loss_is_the_bradley_terry_loss():
    values = torch.tensor([0.0, 1.0, 0.4, 0.0, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([0, 0, 1, 0, 1, 0], dtype=torch.bool)
    # scores 0.4 and -0.2: margin 0.6
    batch = Batch.of(lengths=[3, 3], tokens={"loss_mask": mask}, rows={"unit_id": [4, 4]})

    terms = RewardModel(RewardModel.Config()).loss(TokenOutputs(values=values), batch)
    loss = reduce_terms(terms, batch, count(torch.tensor([1, 1]), batch.unit_sizes()))
    loss.backward()

    assert loss.item() == pytest.approx(math.log(1 + math.exp(-0.6)), abs=1e-6)
    slope = 1 / (1 + math.exp(0.6))
    assert values.grad.tolist() == pytest.approx([0, 0, -slope, 0, slope, 0], abs=1e-6)
    assert reduce_metrics(terms.metrics, batch) == {"margin": Mean(pytest.approx(0.6)), "accuracy": Mean(1.0)}


def test_orpo_adds_the_odds_ratio_to_the_likelihood_of_the_chosen_response():
    """p(chosen) = 1/2 has odds 1, p(rejected) = 1/5 has odds 1/4; both are means over tokens."""
    chosen, rejected = [math.log(0.25), 0.0], [math.log(0.2)] * 3
    log_probs = torch.tensor([7.0, *chosen, 7.0, *rejected], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([0, 1, 1, 0, 1, 1, 1], dtype=torch.bool)
    batch = Batch.of(lengths=[3, 4], tokens={"loss_mask": mask}, rows={"unit_id": [4, 4]})

    terms = ORPO(ORPO.Config(beta=0.3)).loss(TokenOutputs(log_probs=log_probs), batch)

    assert terms.terms.tolist() == pytest.approx([math.log(2) + 0.3 * math.log(1 + 1 / 4)])
    assert reduce_metrics(terms.metrics, batch)["margin"].value == pytest.approx(math.log(4))
    terms.terms.sum().backward()
    # d log odds / d log p = 1 / (1 - p); sigmoid(-margin) = 1/5
    up, down = -1 - 0.3 / 5 * 2, 0.3 / 5 * 1.25
    assert log_probs.grad.tolist() == pytest.approx([0, up / 2, up / 2, 0, down / 3, down / 3, down / 3])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model("qwen2", tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("max_tokens", [16384, 30, 12, 1], ids=lambda number: f"{number}-tokens")
@pytest.mark.parametrize(
    ("head", "algorithm"),
    [("token", DPO(DPO.Config(beta=BETA))), ("value", RewardModel(RewardModel.Config()))],
    ids=["dpo", "reward-model"],
)
def test_one_pass_has_the_gradient_of_plain_pytorch(model, head, algorithm, max_tokens):
    backend = LocalBackend(
        LocalConfig(),
        model=ModelConfig(path=model, max_tokens_per_device=max_tokens),
        optimizer=OptimizerConfig(),
        context=BackendContext(head=head),
    )
    pairs = make_pairs()
    value_head = None if head == "token" else backend._value_head.weight
    wanted, wanted_loss = plain_pair_gradients(model, pairs, beta=BETA, head=value_head)
    counts = count(pairs["num_loss_tokens"], pairs.unit_sizes())

    def loss(out, micro_batch):
        scalar = reduce_terms(algorithm.loss(out, micro_batch), micro_batch, counts)
        return scalar, {"loss": Mean(scalar.item()), "micro_batches": Mean(1.0)}

    metrics = backend.forward_backward(pairs, loss, temperature=1.0)

    assert metrics["micro_batches"].total == {16384: 1, 30: 2, 12: 4, 1: 4}[max_tokens]
    assert metrics["loss"].total == pytest.approx(wanted_loss, rel=1e-5)
    found = {name: parameter.grad for parameter, name in backend._names.items()}
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert float((found[name] - gradient).norm()) <= 1e-5 * float(gradient.norm()) + 1e-8, name


@pytest.mark.parametrize(
    ("reward", "group", "wanted"),
    [
        pytest.param([0.1, 0.9, 0.5], [4, 4, 4], [1, 0], id="one-group"),
        pytest.param([0.0, 1.0, 1.0, 0.5], [2, 1, 2, 1], [1, 3, 2, 0], id="groups-apart"),
        pytest.param([0.5, 0.5, 0.0, 0.0, 1.0], [0, 0, 1, 1, 1], [4, 2], id="a-group-without-variance-has-no-pair"),
        pytest.param([1.0, 1.0, 0.0, 0.0], [0, 0, 0, 0], [0, 2], id="the-first-of-equals"),
        pytest.param([1.0], [0], [], id="one-sample"),
        pytest.param([], [], [], id="none"),
    ],
)
def test_the_best_response_is_paired_with_the_worst(reward, group, wanted):
    assert best_and_worst(torch.tensor(reward), torch.tensor(group, dtype=torch.int64)).tolist() == wanted


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, [2]),
        ({"threshold": 0.95}, []),
        ({"keep": "passed", "threshold": 0.5}, [1, 2, 3, 4]),
        ({"keep": "passed", "threshold": 0.6}, [2]),
    ],
)
def test_best_of_n_keeps_the_best_or_all_above_the_threshold(settings, wanted):
    reward, group = torch.tensor([0.1, 0.5, 0.9, 0.5, 0.5]), torch.tensor([0, 0, 0, 1, 1])

    if "threshold" not in settings:
        reward -= 5  # all rewards may be negative
    assert BestOfN(BestOfN.Config(**settings)).kept(reward, group).tolist() == wanted


def prompts_of(roles):
    rows = {"prompt_id": [8, 5, 3], "group_id": [0, 1, 2], "seed": [1, 2, 3]}
    return Batch.of(lengths=[2, 3, 1], tokens={"input_ids": [1, 2, 3, 4, 5, 6]}, rows=rows)


def test_mini_batches_are_whole_pairs_without_another_forward_pass():
    algorithm = OnlineDPO(OnlineDPO.Config(minibatches=2))
    roles = FakeRoles([role.name for role in algorithm.roles()])
    experience = algorithm.collect(roles, prompts_of(roles))
    pairs = experience.fetch("sample_id").reshape(-1, 2).tolist()
    roles.actor.log_probs = None

    algorithm.update(roles, experience)

    minis = [mini for mini, _ in roles.actor.updates]
    assert [len(mini) for mini in minis] == [4, 2]
    assert sorted(pair for mini in minis for pair in mini.fetch("sample_id").reshape(-1, 2).tolist()) == pairs
    assert [counts.units for _, counts in roles.actor.updates] == [2, 1]


def test_half_a_pair_is_reported_and_not_trained(caplog):
    algorithm = DPO(DPO.Config())
    roles = FakeRoles([role.name for role in algorithm.roles()])
    experience = algorithm.collect(roles, prompts_of(roles)).take([0, 1, 3, 4, 5])

    algorithm.update(roles, experience)

    ((mini, counts),) = roles.actor.updates
    assert (sorted(mini.fetch("group_id").tolist()), counts.units) == ([0, 0, 2, 2], 2)
    assert roles.metrics["experience/incomplete_units"].value == 1.0
    assert "1 units have fewer than 2 rows with one 'group_id' and are not trained" in caplog.text


def test_the_score_token_is_appended_to_every_response():
    batch = Batch.of(lengths=[3, 1, 2], tokens={"input_ids": [5, 6, 7, 8, 9, 4], "loss_mask": [0, 1, 1, 1, 0, 1]})

    ended = with_score_token(batch)

    assert ended["input_ids"].tolist() == [5, 6, 7, 7, 8, 8, 9, 4, 4]
    assert ended["loss_mask"].long().tolist() == [0, 0, 0, 1, 0, 1, 0, 0, 1]
    assert ended.lengths.tolist() == [4, 2, 3]
