"""The adaptive coefficient of the entropy bonus."""

import json

import pytest
import torch
from rlcore_tests.runs import metrics, small_run

from rlcore.algorithms.entropy import AdaptiveEntropyConfig, EntropyController
from rlcore.algorithms.grpo import GRPO, GRPOConfig
from rlcore.algorithms.ppo import PPO, PPOConfig
from rlcore.cli.train import run as train
from rlcore.config.build import build
from rlcore.data.batch import Batch
from rlcore.errors import ConfigError
from rlcore.testing import FakeRoles
from rlcore.types import Mean, TokenOutputs

EVERY_SAMPLE = "algorithm.skip_zero_variance_groups=false"


def test_the_coefficient_rises_below_the_target_and_is_applied_only_there():
    controller = EntropyController(AdaptiveEntropyConfig(target=0.5, delta=0.25, max=0.75), 0.25)
    applied = [controller.coefficient]
    for entropy in (0.4, 0.3, 0.2, 0.6, 0.7, 0.4, 0.5):
        controller.observe(entropy)
        applied.append(controller.coefficient)

    # c: 0.25, 0.5, 0.75, its maximum 0.75, 0.5, 0.25, 0.5, 0.5; not applied at 0.6 and 0.7
    assert applied == [0.25, 0.5, 0.75, 0.75, 0.0, 0.0, 0.5, 0.5]


@pytest.mark.parametrize("lowest", [0.0, 0.125])
def test_the_coefficient_does_not_fall_below_its_minimum(lowest):
    controller = EntropyController(AdaptiveEntropyConfig(target=0.5, delta=0.25, min=lowest, max=0.5), lowest)
    for _ in range(3):
        controller.observe(0.9)
    controller.observe(0.4)

    assert controller.coefficient == lowest + 0.25


@pytest.mark.parametrize("entropy", [float("nan"), float("inf")])
def test_an_entropy_that_is_not_finite_changes_nothing(entropy):
    controller = EntropyController(AdaptiveEntropyConfig(target=0.5, delta=0.25, max=0.5), 0.25)
    controller.observe(entropy)

    assert controller.state_dict() == {"coefficient": 0.25, "entropy": None}


def test_without_a_target_the_coefficient_is_constant():
    controller = EntropyController(AdaptiveEntropyConfig(), 0.01)
    controller.observe(0.1)

    assert controller.coefficient == 0.01


def test_the_state_is_json():
    config = AdaptiveEntropyConfig(target=0.5, delta=0.1, max=0.7)
    one, two = EntropyController(config, 0.0), EntropyController(config, 0.0)
    for entropy in (0.1, 0.2, 0.7):
        one.observe(entropy)
    two.load_state_dict(json.loads(json.dumps(one.state_dict())))
    for controller in (one, two):
        controller.observe(0.4)

    assert one.state_dict() == two.state_dict()
    assert one.coefficient == two.coefficient > 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"adaptive_entropy": {"target": -1.0}}, ["algorithm.adaptive_entropy.target", "0 or more"]),
        ({"adaptive_entropy": {"delta": 0.0}}, ["algorithm.adaptive_entropy.delta", "more than 0"]),
        ({"adaptive_entropy": {"min": -0.1}}, ["algorithm.adaptive_entropy.min", "0 or more"]),
        ({"adaptive_entropy": {"max": 0.1, "min": 0.1}}, ["algorithm.adaptive_entropy.max", "more than min=0.1"]),
        (
            {"adaptive_entropy": {"target": 0.5, "max": 0.01}, "entropy_coefficient": 0.1},
            ["algorithm.entropy_coefficient", "from adaptive_entropy.min=0.0 to max=0.01"],
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, words):
    with pytest.raises(ConfigError) as raised:
        build(GRPOConfig, settings, "algorithm")

    assert all(word in str(raised.value) for word in words), str(raised.value)


@pytest.mark.parametrize(("algorithm", "config"), [(GRPO, GRPOConfig), (PPO, PPOConfig)])
def test_the_loss_has_the_coefficient_of_the_step(algorithm, config):
    made = algorithm(config(adaptive_entropy=AdaptiveEntropyConfig(target=9.0, delta=0.25, max=0.5)))
    constant = algorithm(config(entropy_coefficient=0.25))
    roles = FakeRoles(made.roles())
    rows = {"prompt_id": [8, 5], "group_id": [0, 1], "seed": [1, 2]}
    prompts = Batch.of(lengths=[2, 3], tokens={"input_ids": [1, 2, 3, 4, 5]}, rows=rows)

    made.entropy.observe(1.0)
    experience = made.collect(roles, prompts).local()

    assert roles.metrics["entropy/coefficient"] == Mean(0.25)
    out = TokenOutputs(log_probs=torch.zeros(experience.num_tokens) - 1, entropy=torch.rand(experience.num_tokens))
    assert torch.equal(made.loss(out, experience).terms, constant.loss(out, experience).terms)


def test_a_run_adapts_the_coefficient_and_resumes_bit_for_bit(tmp_path):
    adaptive = "algorithm.adaptive_entropy={target: 9.0, delta: 0.001, max: 0.003}"
    settings = [adaptive, EVERY_SAMPLE, "optimizer.schedule=constant", "checkpoint.every_steps=2"]
    train(small_run(tmp_path / "whole", *settings, steps=5), dry_run=False)
    train(small_run(tmp_path / "cut", *settings, steps=2), dry_run=False)
    train(small_run(tmp_path / "cut", *settings, steps=5), dry_run=False)

    whole = metrics(tmp_path / "whole")
    assert [line["entropy/coefficient"] for line in whole[1:]] == pytest.approx([0, 0.001, 0.002, 0.003, 0.003])
    assert metrics(tmp_path / "cut")[-3:] == whole[-3:]


def test_a_run_above_its_target_has_no_bonus(tmp_path):
    adaptive = "algorithm.adaptive_entropy={target: 0.001, delta: 0.001}"
    settings = [EVERY_SAMPLE, "algorithm.entropy_coefficient=0.005"]
    train(small_run(tmp_path / "adaptive", adaptive, *settings, steps=3), dry_run=False)
    train(small_run(tmp_path / "with", *settings, steps=3), dry_run=False)

    found = metrics(tmp_path / "adaptive")
    # the entropy of the first step is known after it
    assert [line["entropy/coefficient"] for line in found[1:]] == [0.005, 0.0, 0.0]
    assert found[1]["actor/loss"] == metrics(tmp_path / "with")[1]["actor/loss"]
    assert found[2]["actor/loss"] != metrics(tmp_path / "with")[2]["actor/loss"]
