"""Algorithms that learn from texts of the data, have no rollout or reward, hold their own model, or take more prompts."""

import json
import logging
import math
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from rlcore.algorithms.base import Epochs, EpochsConfig
from rlcore.config.build import build
from rlcore.config.schema import Config, ScheduleConfig, TrainerConfig
from rlcore.controller.ref import BatchRef
from rlcore.data.batch import Batch
from rlcore.data.loader import PromptLoader
from rlcore.errors import ConfigError, NumericalError, UserError
from rlcore.models.load import load_tokenizer
from rlcore.protocols.algorithm import RoleSpec
from rlcore.testing import FakeRoles
from rlcore.trainer.describe import describe
from rlcore.trainer.loop import _compare_log_probs
from rlcore.trainer.plan import make_plan
from rlcore.trainer.step import PromptSource, Step
from rlcore.types import LossTerms
from rlcore.workers.demonstrations import demonstrate


@dataclass(frozen=True, slots=True, kw_only=True)
class ImitationConfig(EpochsConfig):
    judge: str = ""
    """Directory of the judge."""


class Imitation(Epochs):
    """Algorithm that learns from the column `answer` and has its own judge."""

    Config = ImitationConfig
    without = ("rollout", "reward")
    demonstrations = ("answer",)

    def roles(self):
        judge = RoleSpec(name="judge", worker="reference", model="algorithm.judge")
        return [RoleSpec(name="actor", worker="policy"), judge]

    def reads(self):
        return {"actor": ["answer"]}

    def writes(self):
        return []

    def collect(self, roles, prompts):
        return roles.demonstrations(prompts, self.demonstrations)

    def loss(self, out, batch):
        return LossTerms(terms=-out.log_probs)


class Distilled(Imitation):
    without = ("reward",)

    def roles(self):
        return [RoleSpec(name="actor", worker="policy"), RoleSpec(name="rollout", worker="rollout")]


class JudgesItself(Imitation):
    def evaluate(self, roles, prompts, config):
        return {"eval/pass_rate": 1.0}, prompts


@pytest.fixture
def plan(assets, tmp_path):
    """Return a plan with eight prompts and a real model."""
    data = tmp_path / "data.jsonl"
    rows = [{"prompt": f"Count to {n}.", "answer": str(n), "number": n, "half": "\ud83d"} for n in range(8)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(algorithm, *, evaluated=False, rewards=(), judge="", **attributes):
        chosen = type(algorithm.__name__, (algorithm,), attributes)
        globals()["Chosen"] = chosen
        plain = {
            "model": {"path": str(assets / "models" / "stories260k")},
            "data": {"train": str(data), "eval": str(data) if evaluated else ""},
            "reward": {"items": list(rewards)},
            "runtime": {"name": "local"},
            "pools": {"main": {"device": "cpu"}},
            "algorithm": {"name": f"{__name__}:Chosen", "judge": judge},
        }
        return make_plan(build(Config, plain), tmp_path / "run")

    return make


@pytest.mark.parametrize(
    ("algorithm", "settings", "roles"),
    [
        pytest.param(Imitation, {}, ["actor", "judge"], id="nothing-is-generated"),
        pytest.param(Imitation, {"rewards": ["exact_match"]}, ["actor", "judge"], id="a-reward-has-nothing-to-score"),
        pytest.param(
            Imitation,
            {"rewards": ["exact_match"], "evaluated": True},
            ["actor", "judge", "rollout", "reward"],
            id="held-out-prompts-are-answered-and-scored",
        ),
        pytest.param(JudgesItself, {"evaluated": True}, ["actor", "judge"], id="it-evaluates-itself"),
        pytest.param(Distilled, {}, ["actor", "rollout"], id="without-reward"),
        pytest.param(Distilled, {"rewards": ["exact_match"]}, ["actor", "rollout", "reward"], id="a-reward-is-shown"),
    ],
)
def test_rollout_and_reward_are_there_when_something_needs_them(plan, algorithm, settings, roles):
    made = plan(algorithm, **settings)

    assert list(made.workers) == roles
    assert bool(made.rewards) == ("reward" in roles)
    assert any(line.startswith("reward ") for line in describe(made)) == ("reward" in roles)


def test_the_plan_counts_the_responses_that_are_read_and_names_no_engine_that_is_not_started(plan):
    read, pairs, drawn = plan(Imitation), plan(Imitation, demonstrations=("answer", "answer")), plan(Distilled)

    lines = [
        [line for line in describe(made) if line.startswith(("step ", "rollout "))] for made in (read, pairs, drawn)
    ]
    assert [len(found) for found in lines] == [1, 1, 2]
    assert "32 prompts × 1 response = 32 rows" in lines[0][0]
    assert "32 prompts × 2 responses (answer, answer) = 64 rows" in lines[1][0]
    assert "32 prompts × 8 samples = 256 rows" in lines[2][1]


def test_rewards_are_required_when_samples_are_scored(plan):
    with pytest.raises(ConfigError, match="no reward is chosen"):
        plan(Imitation, evaluated=True)


def test_log_probs_of_the_engine_travel_only_where_there_is_an_engine(plan):
    assert plan(Imitation).reads["actor"] == ("input_ids", "loss_mask", "answer")
    assert plan(Distilled).reads["actor"] == ("input_ids", "loss_mask", "rollout_log_probs", "first_version", "answer")


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (("anser",), ["learns from column 'anser'", "Did you mean 'answer'?", "data.rename={COLUMN: anser}"]),
        (("number",), ["column 'number' of prompt 0 is 0", "needs text, or messages"]),
        (("half",), ["column 'half' of prompt 0 is '\\ud83d'", "needs text, or messages"]),
    ],
)
def test_demonstrations_are_checked_before_the_start(plan, columns, words):
    with pytest.raises(ConfigError) as raised:
        plan(Imitation, demonstrations=columns)

    assert all(word in str(raised.value) for word in words), str(raised.value)


def test_held_out_prompts_need_demonstrations_only_for_an_evaluation_of_the_algorithm_s_own(plan, tmp_path):
    made = plan(Imitation)
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"prompt": "Count to 9."}\n')
    rewards = build(Config, {"model": {"path": "m"}, "data": {"train": "t"}, "reward": {"items": ["length"]}}).reward
    config = replace(made.config, data=replace(made.config.data, eval=str(held_out)), reward=rewards)

    globals()["Chosen"] = Imitation
    with pytest.raises(UserError, match="reward 'length'"):  # it has no settings; everything before is right
        make_plan(config, tmp_path / "run")
    globals()["Chosen"] = JudgesItself
    with pytest.raises(ConfigError, match="column 'answer'"):
        make_plan(config, tmp_path / "run")


def test_a_role_may_have_a_model_of_its_own(plan, assets, tmp_path):
    own = tmp_path / "judge"
    own.symlink_to(assets / "models" / "stories260k")

    assert plan(Imitation).models["judge"] == str(assets / "models" / "stories260k")
    assert plan(Imitation, judge=str(own)).models["judge"] == str(own)
    with pytest.raises(UserError, match=r"algorithm\.judge=/nowhere"):
        plan(Imitation, judge="/nowhere")


def test_a_model_with_another_tokenizer_is_refused(plan):
    from rlcore.quickstart import locate

    with pytest.raises(ConfigError, match="has a different tokenizer than model"):
        plan(Imitation, judge=locate("quickstart:model"))


def prompts(texts, tokenizer):
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    return Batch.of(
        lengths=[len(part) for part in ids],
        tokens={"input_ids": [token for part in ids for token in part]},
        rows={
            "prompt_id": range(3, 3 + len(ids)),
            "group_id": range(len(ids)),
            "seed": [0] * len(ids),
            "good": ["One day", "a dog"][: len(ids)],
            "bad": ["x", "y"][: len(ids)],
        },
    )


def test_demonstrations_are_prompt_text_and_end_token(assets):
    tokenizer = load_tokenizer(str(assets / "models" / "stories260k"))
    asked = prompts(["Once", "Lily saw"], tokenizer)

    samples = demonstrate(asked, ["good", "bad"], tokenizer, 64)

    parts = samples["input_ids"].split(samples.lengths.tolist())
    masks = samples["loss_mask"].split(samples.lengths.tolist())
    starts = ["Once", "Once", "Lily saw", "Lily saw"]
    answers = ["One day", "x", "a dog", "y"]
    for ids, mask, start, answer in zip(parts, masks, starts, answers, strict=True):
        assert ids[~mask].tolist() == tokenizer(start, add_special_tokens=False)["input_ids"]
        assert ids[mask].tolist() == [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    assert samples["sample_id"].tolist() == [0, 1, 2, 3]
    assert samples["num_loss_tokens"].tolist() == [int(mask.sum()) for mask in masks]
    assert not samples["truncated"].any()
    assert not {"rollout_log_probs", "token_version", "policy_version", "first_version"} & set(samples.columns)


def test_a_long_demonstration_is_cut_and_has_no_end_token(assets):
    tokenizer = load_tokenizer(str(assets / "models" / "stories260k"))

    samples = demonstrate(prompts(["Once"], tokenizer), ["good"], tokenizer, 2)

    kept = samples["input_ids"][samples["loss_mask"]].tolist()
    assert kept == tokenizer("One day", add_special_tokens=False)["input_ids"][:2]
    assert samples["truncated"].tolist() == [True]
    assert list(samples["finish_reason"]) == ["length"]


def test_no_prompts_have_no_demonstrations(assets):
    tokenizer = load_tokenizer(str(assets / "models" / "stories260k"))

    assert len(demonstrate(prompts(["Once"], tokenizer).take([]), ["good"], tokenizer, 8)) == 0


def test_further_prompts_come_from_the_data_in_order_and_are_noted_in_the_ledger():
    loader = PromptLoader(5, seed=1, shuffle=False)
    data = Batch.of(lengths=[1] * 5, tokens={"input_ids": [10, 11, 12, 13, 14]}, rows={"prompt_id": range(5)})
    source, step = PromptSource(loader=loader, prompts=data), Step(number=1)

    first, more = source.take(2, step), source.take(3, step)

    assert first["input_ids"].tolist() == [10, 11]
    assert more["input_ids"].tolist() == [12, 13, 14]
    assert step.positions == [0, 1, 2, 3, 4]
    loader.finish(step.positions)
    loader.consume(step.positions)
    assert loader.outstanding == []


def test_the_fakes_have_further_prompts_and_demonstrations_of_every_column():
    roles = FakeRoles(["actor"])
    one, two = roles.more_prompts(1), roles.more_prompts(2)
    asked = BatchRef.publish(two.local(), roles.store)

    samples = roles.demonstrations(asked, ["good", "bad"])

    assert one.fetch("group_id").tolist() + two.fetch("group_id").tolist() == [1000, 1001, 1002]
    assert samples.fetch("sample_id").tolist() == [2002, 2003, 2004, 2005]
    assert "rollout_log_probs" not in samples


def run_with(trained, **trainer):
    return SimpleNamespace(
        config=SimpleNamespace(trainer=TrainerConfig(**trainer), schedule=ScheduleConfig()),
        warned_of_gap=False,
        counters=SimpleNamespace(step=7),
        roles=SimpleNamespace(trained=trained),
    )


def test_an_engine_with_a_logprob_gap_is_reported_once(caplog):
    run = run_with(["actor"])

    with caplog.at_level(logging.WARNING):
        for gap in (0.0, 0.05, 0.051, 0.4):
            _compare_log_probs(run, {"actor/rollout_logprob_gap": gap})

    (record,) = caplog.records
    assert record.getMessage().startswith("step 7: log-probs of 'actor' and its engine differ by 0.051 nats")


def test_without_steps_ahead_an_engine_that_reports_old_versions_is_checked():
    run, gaps = run_with(["actor"], max_logprob_gap=0.1), {"actor/policy_gap": 0.2}

    with pytest.raises(NumericalError, match=r"the log-probs of 'actor' and its engine differ by 0\.2 on"):
        _compare_log_probs(run, gaps)
    run.config.schedule = ScheduleConfig(steps_ahead=1, max_staleness=1)
    _compare_log_probs(run, gaps)


def test_the_gap_of_every_trained_role_is_checked():
    gaps = {"actor/rollout_logprob_gap": 0.01, "opponent/rollout_logprob_gap": math.nan}

    with pytest.raises(NumericalError, match="the log-probs of 'opponent' and its engine differ by nan") as raised:
        _compare_log_probs(run_with(["actor", "opponent"], max_logprob_gap=0.1), gaps)
    assert str(raised.value).endswith("Use the same model.precision and weights for both")
    with pytest.raises(NumericalError, match=r"or allow more:  trainer\.max_logprob_gap=0\.4"):
        _compare_log_probs(run_with(["actor"], max_logprob_gap=0.1), {"actor/rollout_logprob_gap": 0.2})
    _compare_log_probs(run_with([], max_logprob_gap=0.1), {})
