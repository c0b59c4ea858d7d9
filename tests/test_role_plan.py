"""Roles as data: the fields of a RoleSpec, roles that receive weights, and examples that add roles."""

import json
import re
import shutil

import pytest
import torch
from rlcore_tests.runs import metrics, small_run
from safetensors.torch import load_file

from rlcore.algorithms.grpo import GRPO
from rlcore.algorithms.ppo import PPO
from rlcore.cli import main
from rlcore.cli.train import run as train
from rlcore.config.build import build
from rlcore.config.schema import Config
from rlcore.errors import ConfigError, RunError
from rlcore.protocols.algorithm import RoleSpec
from rlcore.quickstart import cache_directory, prepare
from rlcore.trainer.role_plan import plan_models, plan_roles
from rlcore.trainer.roles import Roles
from rlcore.trainer.step import Step
from rlcore.types import Mesh
from rlcore.workers.policy import ReferenceWorker
from rlcore.workers.rollout import RolloutWorker
from tests.test_examples import EXAMPLES

ACTOR = RoleSpec(name="actor", worker="policy")


def algorithm(*specs):
    made = GRPO(GRPO.Config())
    made.roles = lambda: list(specs)
    return made


def config(**settings):
    return build(Config, {"model": {"path": "m"}, "data": {"train": "t"}, **settings})


def test_the_kind_of_worker_decides_what_a_spec_leaves_open():
    specs, workers = plan_roles(config(), PPO(PPO.Config()))

    assert [(name, spec.loss, spec.weights_from, spec.optimizer) for name, spec in specs.items()] == [
        ("actor", "loss", "", "optimizer"),
        ("critic", "value_loss", "", "critic.optimizer"),
        ("rollout", "", "actor", "optimizer"),
        ("reward", "", "", "optimizer"),
    ]
    assert list(workers) == list(specs)


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        pytest.param(
            [ACTOR, RoleSpec(name="rollout", worker="rollout", weights_from="acter")],
            "role 'rollout' has weights_from='acter', but this run has no role 'acter'. Did you mean 'actor'?\n"
            "Roles with weights: actor",
            id="unknown-source",
        ),
        pytest.param(
            [ACTOR, RoleSpec(name="teacher", worker="reference", weights_from="reward")],
            "role 'teacher' has weights_from='reward', but this run has no weights of 'reward' to send.\n"
            "Roles with weights: actor",
            id="source-without-weights",
        ),
        pytest.param(
            [ACTOR, RoleSpec(name="reward", worker="reward", weights_from="actor")],
            "role 'reward' has weights_from='actor', but a worker of kind 'reward' cannot load weights\n"
            'Use a kind with a model, such as worker="reference"',
            id="target-without-a-model",
        ),
        pytest.param(
            [ACTOR, RoleSpec(name="slow", worker="critic", loss="", weights_from="actor")],
            "role 'slow' has weights_from='actor', but value heads are not sent\n"
            'Use a kind without a value head, such as worker="reference"',
            id="target-with-a-value-head",
        ),
        pytest.param(
            [
                ACTOR,
                RoleSpec(name="opponent", worker="policy"),
                RoleSpec(name="rollout", worker="rollout", weights_from="actor"),
                RoleSpec(name="rollout", worker="rollout", weights_from="opponent"),
            ],
            "role 'rollout' would receive the weights of both 'actor' and 'opponent'\n"
            'Give each its own:  RoleSpec(name="opponent_rollout", worker="rollout", weights_from="opponent")',
            id="two-roles-for-one-rollout",
        ),
        pytest.param(
            [ACTOR, ACTOR],
            "the algorithm has two roles named 'actor'\nGive each RoleSpec another name.",
            id="one-name-twice",
        ),
        pytest.param(
            [RoleSpec(name="actor", worker="policy", loss="los")],
            "role 'actor' is trained with 'los', but GRPO has no method of this name. Did you mean 'loss'?\n"
            "Write  def los(self, out, batch)   or set RoleSpec.loss",
            id="unknown-loss",
        ),
    ],
)
def test_a_spec_that_cannot_work_is_refused(specs, message):
    with pytest.raises(ConfigError) as error:
        plan_roles(config(), algorithm(*specs))

    assert str(error.value) == message


class Plain:
    """Worker without a base class."""

    def __init__(self, context):
        self.mesh = Mesh(dp_size=context.world_size)

    def abort(self):
        """Do nothing: no call runs."""

    def close(self):
        """Free nothing."""


def test_a_worker_that_cannot_answer_the_planner_is_refused():
    with pytest.raises(ConfigError) as error:
        plan_roles(config(), algorithm(ACTOR, RoleSpec(name="extra", worker=f"{__file__}:Plain")))

    assert str(error.value) == (
        f"role 'extra': worker '{__file__}:Plain' is not a subclass of rlcore.workers.base.Worker\n"
        "Write  class Plain(Worker)"
    )


@pytest.mark.parametrize(
    ("reads", "message"),
    [
        ({}, "trains 'actor', but its reads() has no columns for it"),
        ({"actor": [], "actr": []}, "names 'actr', which is not a trained role. Did you mean 'actor'?"),
    ],
)
def test_columns_are_read_by_the_trained_roles_and_no_others(reads, message):
    made = algorithm(ACTOR)
    made.reads = lambda: reads

    with pytest.raises(ConfigError, match=re.escape(message)):
        plan_roles(config(), made)


def test_every_rollout_plays_episodes_if_there_is_an_environment():
    other = RoleSpec(name="other", worker="rollout")

    specs, _ = plan_roles(config(environment="e"), algorithm(ACTOR, other))

    assert {name for name, spec in specs.items() if spec.worker == "episodes"} == {"rollout", "other"}


def test_a_model_in_a_setting_that_does_not_exist_is_refused(assets):
    spec = RoleSpec(name="teacher", worker="reference", model="algorithm.teecher")

    with pytest.raises(
        ConfigError, match=r"role 'teacher' is in the setting 'algorithm\.teecher', which does not exist"
    ):
        plan_models(config(model={"path": str(assets / "models" / "stories260k")}), GRPO.Config(), {"teacher": spec})


def test_a_role_without_a_model_starts_from_that_of_its_source(assets, tmp_path):
    base = assets / "models" / "stories260k"
    other = shutil.copytree(base, tmp_path / "other")
    specs = {
        "opponent": RoleSpec(name="opponent", worker="policy", model="critic.path"),
        "rollout": RoleSpec(name="rollout", worker="rollout", weights_from="opponent"),
        "average": RoleSpec(name="average", worker="reference", weights_from="rollout"),
        "one": RoleSpec(name="one", worker="reference", weights_from="two"),
        "two": RoleSpec(name="two", worker="reference", weights_from="one"),
    }

    models = plan_models(config(model={"path": str(base)}, critic={"path": str(other)}), GRPO.Config(), specs)

    assert models == {
        **dict.fromkeys(("opponent", "rollout", "average"), str(other)),
        "one": str(base),
        "two": str(base),
    }


class Quiet:
    """Group without hosts, and a transfer that records what is sent."""

    pool, meshes, ranks = "main", (), ()

    def __init__(self, worker_class=ReferenceWorker):
        self.worker_class, self.sent = worker_class, []

    def recording(self, *_):
        return self

    def send(self, version, mix):
        self.sent.append((version, mix))


def quiet_roles(transfers=None, **groups):
    return Roles(groups, sampling=None, samples_per_prompt=1, reward=None, transfers=transfers or {})


def test_an_engine_does_not_mix_weights():
    transfer = Quiet()
    roles = quiet_roles({("actor", "rollout"): transfer}, actor=Quiet(), rollout=Quiet(RolloutWorker))

    with pytest.raises(ConfigError, match="an engine replaces its weights, it cannot mix them"):
        roles.send("actor", "rollout", mix=0.5)
    roles.send("actor", "rollout")

    assert transfer.sent == [(0, 1.0)]


def test_a_step_that_sent_weights_is_not_saved_as_unchanged():
    roles = quiet_roles({("actor", "teacher"): Quiet()}, actor=Quiet(), teacher=Quiet()).during(Step(number=1))

    assert roles.step.collecting
    roles.send("actor", "teacher", mix=0.5)
    assert not roles.step.collecting


def test_weights_go_only_where_a_role_declares_it():
    roles = quiet_roles(actor=Quiet(), teacher=Quiet())

    with pytest.raises(ConfigError, match=r"'teacher' does not receive the weights of 'actor'\nDeclare it"):
        roles.send("actor", "teacher")
    with pytest.raises(AttributeError, match="no role 'techer'"):
        roles.send("actor", "techer")
    with pytest.raises(ValueError, match="mix: expected more than 0, at most 1"):
        roles.send("actor", "teacher", mix=0.0)


def small(directory, example, *more, steps):
    return small_run(directory, f"algorithm={EXAMPLES / example}", *more, steps=steps)


def weights(directory, step, role):
    return load_file(directory / "r" / "checkpoints" / f"step_{step:06d}" / role / "model.safetensors")


def assert_same_weights(directories, step, role):
    one, two = (weights(directory, step, role) for directory in directories)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_the_teacher_is_the_moving_average_of_the_policy(tmp_path):
    example = "ema_teacher.py:EMATeacher"
    train(small(tmp_path, example, "algorithm.rate=0.25", "checkpoint.every_steps=1", steps=2), dry_run=False)

    before, after = weights(tmp_path, 1, "reference"), weights(tmp_path, 2, "reference")
    policy = weights(tmp_path, 2, "actor")
    for name, parameter in after.items():
        torch.testing.assert_close(parameter, 0.75 * before[name] + 0.25 * policy[name], rtol=1e-6, atol=1e-7)
    assert any(not torch.equal(before[name], after[name]) for name in after)


@pytest.mark.parametrize(
    ("example", "roles"),
    [("ema_teacher.py:EMATeacher", ("actor", "reference")), ("self_play.py:SelfPlay", ("actor", "opponent"))],
)
@pytest.mark.parametrize("runtime", ["local", "ray"])
def test_a_resumed_run_of_an_example_equals_an_uninterrupted_one(tmp_path, example, roles, runtime):
    more = (f"runtime={runtime}", "data.eval=", "checkpoint.every_steps=1")
    whole, parts = tmp_path / "whole", tmp_path / "parts"

    train(small(whole, example, *more, steps=3), dry_run=False)
    train(small(parts, example, *more, steps=1), dry_run=False)
    train(small(parts, example, *more, steps=3), dry_run=False)

    assert metrics(parts) == metrics(whole)
    for role in roles:
        assert_same_weights((whole, parts), 3, role)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_the_reference_follows_the_policy_every_second_step(tmp_path, algorithm):
    moving = ["kl.coefficient=0.05", "kl.sync_every_steps=2", "kl.sync_mix=0.25", "epochs=2"]
    settings = [
        f"algorithm={algorithm}",
        *(f"algorithm.{it}" for it in moving),
        "data.eval=",
        "checkpoint.every_steps=1",
    ]
    train(small_run(tmp_path, *settings, "checkpoint.keep_last=9", steps=1), dry_run=False)
    train(small_run(tmp_path, *settings, "checkpoint.keep_last=9", steps=4), dry_run=False)

    start = load_file(prepare(cache_directory()).model / "model.safetensors")
    references = [start, *(weights(tmp_path, step, "reference") for step in range(1, 5))]
    for name in start:
        for step in (1, 3):
            assert torch.equal(references[step][name], references[step - 1][name])
        for step in (2, 4):
            policy = weights(tmp_path, step, "actor")[name]
            wanted = 0.75 * references[step - 1][name] + 0.25 * policy
            torch.testing.assert_close(references[step][name], wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "pools",
    [
        ["runtime=local", "pools.side.devices_per_node=2", "pools.side.device=cpu", "placement.memory=side"],
        ["runtime=ray", "pools.main.devices_per_node=2"],
    ],
    ids=["local", "ray"],
)
def test_workers_of_a_file_remember_the_answers_to_their_prompts(tmp_path, pools):
    """Two ranks, each with half of the prompts; the memory survives a resume."""
    more = [*pools, "data.eval=", "checkpoint.every_steps=1"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"

    train(small(whole, "novelty.py:Novel", *more, steps=3), dry_run=False)
    train(small(parts, "novelty.py:Novel", *more, steps=1), dry_run=False)
    train(small(parts, "novelty.py:Novel", *more, steps=3), dry_run=False)

    assert metrics(parts) == metrics(whole)
    for rank in range(2):
        saved = [it / "r" / "checkpoints" / "step_000003" / "memory" / f"rank_{rank}.json" for it in (whole, parts)]
        answers, resumed = (json.loads(path.read_text()) for path in saved)
        assert resumed == answers
        assert {int(prompt) % 2 for prompt in answers} == {rank}


def test_answers_that_a_prompt_had_before_are_not_new(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"prompt": "sort 12345=", "digits": "12345"}\n')
    one = [f"data.train={tmp_path}/data.jsonl", "data.eval=", "trainer.prompts_per_step=1", "sampling.temperature=0"]

    train(small(tmp_path, "novelty.py:Novel", *one, "algorithm.bonus=0", steps=2), dry_run=False)

    new = [line["memory/new_answers"] for line in metrics(tmp_path)[1:]]
    assert new == [1 / 4, 0]  # the same answer eight times, as nothing is learned


def test_a_run_that_places_its_own_role_can_be_evaluated(tmp_path, capsys):
    train(small(tmp_path, "self_play.py:SelfPlay", "placement.opponent=main", steps=1), dry_run=False)
    capsys.readouterr()

    assert main(["eval", str(tmp_path / "r"), "eval.max_prompts=2", "--json"]) == 0

    assert json.loads(capsys.readouterr().out)["eval/samples"] == 2


def test_an_algorithm_with_its_own_update_is_stopped_when_no_sample_has_a_reward(tmp_path):
    (tmp_path / "broken.py").write_text("def broken(completion, **_):\n    raise ValueError('no')\n")
    limits = ("reward.on_error=drop", "trainer.max_skipped_steps=2", "data.eval=")

    with pytest.raises(RunError, match="2 steps in a row changed nothing"):
        train(
            small(tmp_path, "self_play.py:SelfPlay", f"reward={tmp_path}/broken.py:broken", *limits, steps=3),
            dry_run=False,
        )


def test_both_players_are_trained_on_their_own_samples(tmp_path):
    train(small(tmp_path, "self_play.py:SelfPlay", steps=2), dry_run=False)

    actor, opponent = weights(tmp_path, 2, "actor"), weights(tmp_path, 2, "opponent")
    assert any(not torch.equal(actor[name], opponent[name]) for name in actor)
    assert all("opponent/rollout_logprob_gap" in step and "self_play/wins" in step for step in metrics(tmp_path)[1:])
