"""Pairs: the loss split by rows has the value and gradient of the joint loss, and margins follow the weights."""

import math

import pytest
import torch
import torch.nn.functional as F
from rlcore_algorithms.best_of_n import BestOfN
from rlcore_algorithms.dpo import DPO
from rlcore_algorithms.online_dpo import OnlineDPO, best_and_worst
from rlcore_algorithms.reward_model import RewardModel, with_score_token

from rlcore.data.batch import Batch
from rlcore.testing import FakeRoles
from rlcore.types import TokenOutputs
from rlcore.workers.averaging import count, reduce_terms

LENGTHS = [3, 2, 4, 5]
MASK = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1, 1, 0, 1, 1, 1, 1], dtype=torch.bool)


def pairs(margins):
    return Batch.of(
        lengths=LENGTHS,
        tokens={"loss_mask": MASK},
        rows={"margin": torch.tensor(margins).repeat_interleave(2), "sign": torch.tensor([1.0, -1.0, 1.0, -1.0])},
    )


def test_the_dpo_loss_split_by_rows_equals_the_published_one():
    generator = torch.Generator().manual_seed(0)
    log_probs = -torch.rand(14, generator=generator, dtype=torch.float64)
    ref = -torch.rand(14, generator=generator, dtype=torch.float64)
    beta = 0.3

    # arXiv 2305.18290, eq. 7, with log-probs of whole responses
    joint = log_probs.clone().requires_grad_()
    sums = torch.stack([part.sum() for part in ((joint - ref) * MASK).split(LENGTHS)])
    wanted = -F.logsigmoid(beta * (sums[0::2] - sums[1::2])).mean()
    wanted.backward()

    margins = (beta * (sums[0::2] - sums[1::2])).tolist()
    batch = pairs(margins)
    algorithm, leaf = DPO(DPO.Config(beta=beta)), log_probs.clone().requires_grad_()
    counts, total = count(batch.per_row(MASK.long())), 0.0
    for row, part in enumerate(leaf.split(LENGTHS)):
        alone = batch.take([row])
        terms = algorithm.loss(TokenOutputs(log_probs=part), alone)
        total = total + reduce_terms(terms, alone, counts)
    total.backward()

    assert total.item() == pytest.approx(wanted.item(), abs=1e-7)
    assert torch.allclose(leaf.grad, joint.grad, atol=1e-8)


def test_the_reward_model_loss_is_the_bradley_terry_loss():
    values = torch.tensor([0.0, 1.0, 0.4, 0.0, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([0, 0, 1, 0, 1, 0], dtype=torch.bool)
    # scores 0.4 and -0.2: margin 0.6
    batch = Batch.of(
        lengths=[3, 3],
        tokens={"loss_mask": mask},
        rows={"margin": [0.6, 0.6], "sign": [1.0, -1.0]},
    )

    terms = RewardModel(RewardModel.Config()).loss(TokenOutputs(values=values), batch)
    loss = reduce_terms(terms, batch, count(torch.tensor([1, 1])))
    loss.backward()

    assert loss.item() == pytest.approx(math.log(1 + math.exp(-0.6)), abs=1e-6)
    slope = 1 / (1 + math.exp(0.6))
    assert values.grad.tolist() == pytest.approx([0, 0, -slope, 0, slope, 0], abs=1e-6)


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


class Drifting(FakeRoles):
    """Fake roles whose actor changes the log-probs of responses with every update."""

    def __init__(self, names):
        super().__init__(names)
        actor, plain = self.actor, self.actor.log_probs

        def log_probs(batch):
            return actor.apply(shifted, plain(batch) | batch.select("loss_mask"), by=0.25 * len(actor.updates))

        actor.log_probs = log_probs


def shifted(batch, *, by):
    return Batch.of(
        lengths=batch.lengths,
        tokens={
            "log_probs": batch["log_probs"] + by * batch["loss_mask"] * torch.arange(batch.num_tokens) / 10,
            "entropy": batch["entropy"],
        },
    )


def test_mini_batches_are_whole_pairs_with_margins_under_the_current_weights():
    algorithm = OnlineDPO(OnlineDPO.Config(minibatches=2, beta=1.0))
    roles = Drifting([role.name for role in algorithm.roles()])
    rows = {"prompt_id": [8, 5], "group_id": [0, 1], "seed": [1, 2]}
    prompts = Batch.of(lengths=[2, 3], tokens={"input_ids": [1, 2, 3, 4, 5]}, rows=rows)
    experience = algorithm.collect(roles, prompts)
    before = dict(zip(experience.fetch("sample_id").tolist(), experience.fetch("margin").tolist()))

    algorithm.update(roles, experience)

    (first, _), (second, _) = roles.actor.updates
    for mini in (first, second):
        assert sorted(mini.fetch("sign").tolist()) == [-1, 1]
        assert mini.fetch("margin")[0] == mini.fetch("margin")[1]
    assert first.fetch("margin")[0].item() == before[first.fetch("sample_id")[0].item()]
    assert second.fetch("margin")[0].item() != before[second.fetch("sample_id")[0].item()]


def test_the_score_token_is_appended_to_every_response():
    batch = Batch.of(lengths=[3, 1, 2], tokens={"input_ids": [5, 6, 7, 8, 9, 4], "loss_mask": [0, 1, 1, 1, 0, 1]})

    ended = with_score_token(batch)

    assert ended["input_ids"].tolist() == [5, 6, 7, 7, 8, 8, 9, 4, 4]
    assert ended["loss_mask"].long().tolist() == [0, 0, 0, 1, 0, 1, 0, 0, 1]
    assert ended.lengths.tolist() == [4, 2, 3]
