"""Rewards that are requested before the step that trains on their samples."""

import json
import os
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from rlcore_tests.runs import metrics, small_run

from rlcore.algorithms.grpo import GRPO
from rlcore.backends.local import LocalBackend, LocalConfig
from rlcore.cli.train import run as train
from rlcore.controller.future import Future
from rlcore.controller.ref import BatchRef
from rlcore.data.batch import Batch
from rlcore.errors import InfrastructureError, RlcoreError
from rlcore.protocols.reward import RewardSpec
from rlcore.rewards.executor import RewardExecutor
from rlcore.testing.fakes import FakeStore
from rlcore.testing.waiting import HANG_S, wait_until
from rlcore.trainer.rewards_ahead import RewardsAhead
from rlcore.trainer.step import Step
from tests.test_async import ASYNC, check_whole, cluster  # noqa: F401  (a fixture)
from tests.test_prefetch import PIPELINED

STORE = FakeStore()
PER_GROUP = 2
UPDATES = 4
"""Optimizer steps in a step of the quickstart."""


class Role:
    """A group of workers that finish a call when they are told to; each call takes one second and two bytes."""

    def __init__(self, pool, column, function, error=None):
        self.pool, self._column, self._function, self._error = pool, column, function, error
        self.calls, self.is_done, self._record = [], True, None
        self.score = self.scores = self

    def recording(self, record):
        self._record = record
        return self

    def submit(self, samples):
        record = self._record
        record.num_bytes += 2
        self.calls.append(samples.fetch("group_id").tolist())

        def wait(interrupt):
            if self._error:
                raise self._error
            record.spent(self._column, 1.0)
            return BatchRef.publish(
                Batch.of(lengths=samples.lengths, rows={self._column: self._function(samples)}), STORE
            )

        return Future(wait, lambda: self.is_done)


def reward(error=None):
    """A role that gives each sample a number of its own."""
    return Role("actor", "reward", lambda it: it.fetch("group_id") * 10 + it.fetch("sample_id"), error)


def samples_of(positions):
    """Return samples of these groups, numbered from 0 in each."""
    group_id = [position for position in positions for _ in range(PER_GROUP)]
    sample_id = [*range(PER_GROUP)] * len(positions)
    lengths = [1 + position % 3 for position in group_id]
    ids = torch.arange(sum(lengths))
    rows = {"group_id": group_id, "sample_id": sample_id}
    return BatchRef.publish(Batch.of(lengths=lengths, tokens={"input_ids": ids}, rows=rows), STORE)


def request(ahead, *positions):
    ahead.request(list(positions), samples_of(positions), Step(number=1))


def test_every_sample_gets_its_own_reward_however_it_was_requested():
    role, step = reward(), Step(number=2)
    ahead = RewardsAhead({"reward": role})
    request(ahead, 3, 1, 8)
    request(ahead, 7)
    samples = samples_of([1, 7, 5, 3])

    scored = ahead.scored([1, 7, 5, 3], samples, step)

    assert scored.fetch("reward").tolist() == [10, 11, 70, 71, 50, 51, 30, 31]
    assert role.calls == [[3, 3, 1, 1, 8, 8], [7, 7], [5, 5]]
    assert torch.equal(scored.fetch("input_ids"), samples.fetch("input_ids"))
    assert step.metrics["schedule/scored_ahead"].value == 3 / 4
    assert ahead.scored([8], samples_of([8]), Step(number=3)).fetch("reward").tolist() == [80, 81]
    assert len(role.calls) == 3


def test_the_costs_of_a_call_are_those_of_the_first_step_that_uses_it():
    ahead = RewardsAhead({"reward": reward()})
    request(ahead, 1, 2)
    steps = [Step(number=number) for number in (2, 3)]

    for position, step in zip((1, 2), steps):
        ahead.scored([position], samples_of([position]), step)

    assert [step.busy_s for step in steps] == [{"reward": 1.0}, {}]
    assert [step.num_bytes for step in steps] == [2, 0]


def test_one_call_runs_at_a_time():
    role = reward()
    ahead = RewardsAhead({"reward": role})
    assert ahead.is_free()

    role.is_done = False
    request(ahead, 1)
    assert not ahead.is_free()
    assert 1 in ahead and 2 not in ahead

    role.is_done = True
    assert ahead.is_free()


def test_rewards_see_the_score_of_a_reward_model_of_their_samples():
    model = Role("judges", "model_score", lambda it: it.fetch("group_id") * 100)
    role = Role("actor", "reward", lambda it: it.fetch("model_score") + it.fetch("sample_id"))
    model.is_done = False
    ahead = RewardsAhead({"reward": role, "reward_model": model})
    request(ahead, 2, 1)
    assert not ahead.is_free()
    assert role.calls == []

    model.is_done = True
    assert ahead.is_free()
    assert role.calls == [[2, 2, 1, 1]]
    step = Step(number=2)
    scored = ahead.scored([1, 2, 4], samples_of([1, 2, 4]), step)
    assert scored.fetch("reward").tolist() == [100, 101, 200, 201, 400, 401]
    assert scored.fetch("model_score").tolist() == [100, 100, 200, 200, 400, 400]
    assert step.busy_s == {"model_score": 2.0, "reward": 2.0}


@pytest.mark.parametrize("fails", ["reward", "reward_model"])
def test_an_error_is_raised_in_the_step_of_the_samples(fails):
    error = InfrastructureError("no answer")
    roles = {"reward": reward(), "reward_model": Role("judges", "model_score", lambda it: it.fetch("group_id"))}
    roles[fails]._error = error
    ahead = RewardsAhead(roles)

    request(ahead, 1)
    assert ahead.is_free()
    request(ahead, 2)

    for position in (2, 1):
        with pytest.raises(InfrastructureError, match="no answer"):
            ahead.scored([position], samples_of([position]), Step(number=2))


@pytest.mark.parametrize(
    ("pools", "possible"),
    [
        ({"actor": "main", "rollout": "main", "reward": "main"}, True),
        ({"actor": "main", "rollout": "main"}, False),
        ({"actor": "a", "rollout": "b", "reward": "a", "reward_model": "a"}, False),
        ({"actor": "a", "rollout": "b", "reward": "a", "reward_model": "b"}, False),
        ({"actor": "a", "rollout": "b", "reward": "c", "reward_model": "c"}, True),
    ],
    ids=lambda it: " ".join(it.values()) if isinstance(it, dict) else "",
)
def test_a_reward_model_needs_hosts_of_its_own(pools, possible):
    roles = {name: Role(pool, "reward", lambda it: it.fetch("group_id")) for name, pool in pools.items()}

    assert (RewardsAhead.of(roles) is not None) == possible


def test_groups_that_nobody_asked_for_are_counted():
    ahead = RewardsAhead({"reward": reward()})
    request(ahead, 1, 2, 3)
    ahead.scored([2], samples_of([2]), Step(number=2))

    assert ahead.discard([1, 2, 9]) == 1
    assert [position in ahead for position in (1, 2, 3)] == [False, False, True]


def waits(completion):
    """Wait longer than any test."""
    threading.Event().wait(2 * HANG_S)


def test_an_executor_that_is_closed_while_it_scores_ends_the_call():
    executor, errors = RewardExecutor([RewardSpec("waits", f"{__file__}:waits")], timeout_s=2 * HANG_S), []

    def score():
        try:
            executor.score([{"completion": "", "sample_id": 0, "prompt_id": 0}])
        except (InfrastructureError, OSError) as error:
            errors.append(error)

    thread = threading.Thread(target=score)
    thread.start()
    (child,) = executor._children
    wait_until(lambda: child.jobs)

    executor.close()

    thread.join(HANG_S)
    assert len(errors) == 1
    assert [it.died() for it in executor._children] == [True]


def noted(completion, sample_id, *, file):
    """Append the sample to a file, and return a reward that only this response to this prompt gets."""
    with open(file, "a") as lines:
        lines.write(f"{sample_id}\n")
    return float(sample_id) + len(completion) / 16


class Together:
    """Reward that depends on the samples which are scored in the same call; some of them fail."""

    batched = True

    def __call__(self, completion, sample_id):
        if 40 in sample_id:
            return [None, "not a number", *range(len(completion) - 2)]
        return [len(it) + sum(map(len, completion)) / 1000 for it in completion]


class Looks(GRPO):
    """An algorithm that takes three more prompts in every step; the controller looks for groups before, and twice later."""

    def draw(self, roles, prompts):
        samples = super().draw(roles, prompts)
        roles.step.while_waiting()
        return samples.cat([samples, super().draw(roles, roles.more_prompts(3))])

    def update(self, roles, experience):
        roles.step.while_waiting()
        roles.step.while_waiting()
        return super().update(roles, experience)


def by_rank(completion):
    return float(len(completion))


def pipelined(directory, *more, steps=4):
    train(small_run(directory, *PIPELINED, *more, steps=steps), dry_run=False)
    return metrics(directory)


def notes(directory, *more):
    """Return the setting of a reward that notes the samples which it scores, and its file."""
    file = directory / "scored"
    rewards = ", ".join([f"{{name: '{__file__}:noted', file: '{file}'}}", *more])
    return f"reward=[{rewards}]", file


def scored_ahead(directory):
    lines = [json.loads(line) for line in (directory / "r" / "metrics.jsonl").read_text().splitlines()]
    return [line["schedule/scored_ahead"] for line in lines[1:]]


@pytest.mark.parametrize(
    "more",
    [
        (f"reward=[{{name: '{__file__}:Together'}}, {{name: '{__file__}:by_rank', relative: rank}}]",),
        (f"reward={__file__}:Together", f"algorithm={__file__}:Looks"),
    ],
    ids=["relative", "refills"],
)
def test_results_are_those_of_rewards_in_the_step(tmp_path, monkeypatch, cluster, more):  # noqa: F811
    more = (*more, "reward.on_error=drop")
    ahead, on_ray = (pipelined(tmp_path / name, *its, *more) for name, its in {"local": [], "ray": cluster}.items())
    monkeypatch.setattr(RewardsAhead, "of", lambda groups: None)
    in_step = pipelined(tmp_path / "in_step", *more)

    assert ahead == in_step == on_ray
    assert sum(line["reward/num_error"] for line in ahead[1:]) > 0
    assert scored_ahead(tmp_path / "local") == scored_ahead(tmp_path / "ray")
    assert 0 == scored_ahead(tmp_path / "local")[0] < scored_ahead(tmp_path / "local")[1]


@pytest.mark.parametrize("algorithm", ["grpo", f"{__file__}:Looks"], ids=["once", "refills"])
@pytest.mark.parametrize("on_ray", [False, True], ids=["local", "ray"])
def test_every_sample_is_scored_once(tmp_path, cluster, on_ray, algorithm):  # noqa: F811
    reward, file = notes(tmp_path)
    pipelined(tmp_path, *(cluster if on_ray else ()), reward, f"algorithm={algorithm}", "data.eval=")

    num_groups, ahead = (8, 1.0) if algorithm == "grpo" else (11, 8 / 11)
    assert Counter(file.read_text().split()) == dict.fromkeys(map(str, range(4 * num_groups * 4)), 1)
    assert scored_ahead(tmp_path) == pytest.approx([0, ahead, ahead, ahead])


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitsConfig(LocalConfig):
    file: str = ""
    num_steps: int = 0


class Waits(LocalBackend):
    """Backend that trains only once a reward of a later step was computed, except in the last step."""

    Config = WaitsConfig

    def __init__(self, config, **options):
        super().__init__(config, **options)
        self._waits = config

    def step(self):
        step = self.num_steps // UPDATES + 1
        if step < self._waits.num_steps:
            wait_until(lambda: len(Path(self._waits.file).read_text().split()) > 32 * step)
        return super().step()


@pytest.mark.parametrize("schedule", [PIPELINED, ASYNC], ids=["pipelined", "async"])
def test_rewards_are_computed_while_the_trainer_works(tmp_path, cluster, schedule):  # noqa: F811
    reward, file = notes(tmp_path)
    backend = (f"backend={__file__}:Waits", f"backend.file={file}", "backend.num_steps=3")
    more = (*schedule, "data.eval=", "trainer.log_samples=1000", reward, *backend)
    train(small_run(tmp_path, *more, *cluster, steps=3), dry_run=False)

    assert Counter(file.read_text().split()) == dict.fromkeys(map(str, range(3 * 32)), 1)
    assert scored_ahead(tmp_path)[0] == 0 < min(scored_ahead(tmp_path)[1:])
    check_whole(tmp_path, steps=3)
    lines = [json.loads(line) for line in (tmp_path / "r" / "samples.jsonl").read_text().splitlines()]
    assert [it["reward"] for it in lines] == [it["sample_id"] + len(it["completion"]) / 16 for it in lines]


def test_rewards_survive_the_loss_of_an_engine(tmp_path, cluster, caplog):  # noqa: F811
    """The samples of the engine that fails are generated by the other one, and scored once."""
    reward, file = notes(tmp_path)
    engines = ("pools.rollout.devices_per_node=2", f"rollout={Path(__file__).parent}/test_engine_failures.py:OneFails")
    fault = ("rollout.fault=raise", "rollout.fault_after=40", "data.eval=", "trainer.log_samples=1000")
    backend = (f"backend={__file__}:Waits", f"backend.file={file}", "backend.num_steps=4")
    settings = [it for it in ASYNC if "max_batch" not in it]
    train(small_run(tmp_path, *settings, *cluster, *engines, *fault, *backend, reward), dry_run=False)

    assert "engine 1 of pool 'rollout' failed and is left out" in caplog.text
    assert Counter(file.read_text().split()) == dict.fromkeys(map(str, range(4 * 32)), 1)
    check_whole(tmp_path, steps=4)
    lines = [json.loads(line) for line in (tmp_path / "r" / "samples.jsonl").read_text().splitlines()]
    assert [it["reward"] for it in lines] == [it["sample_id"] + len(it["completion"]) / 16 for it in lines]


def third_fails(completion, sample_id):
    """Raise for one sample of the third step."""
    if sample_id == 4 * 17 and "RLCORE_TEST_STOP" in os.environ:
        raise ValueError("this one cannot be scored")
    return len(completion) / 16


def test_a_reward_that_fails_ahead_ends_its_own_step(tmp_path, monkeypatch):
    reward = f"reward={__file__}:third_fails"
    whole = pipelined(tmp_path / "whole", reward)
    monkeypatch.setenv("RLCORE_TEST_STOP", "")
    with pytest.raises(RlcoreError, match="this one cannot be scored"):
        pipelined(tmp_path / "cut", reward)
    assert len(metrics(tmp_path / "cut")) == 1 + 2
    assert [it.name for it in (tmp_path / "cut" / "r" / "checkpoints").iterdir()] == ["step_000002"]

    monkeypatch.delenv("RLCORE_TEST_STOP")
    assert pipelined(tmp_path / "cut", reward) == whole


class Reorders(GRPO):
    """An algorithm that scores the samples of `roles.generate` in another order."""

    def draw(self, roles, prompts):
        samples = roles.generate(prompts)
        return roles.score(samples.take(range(len(samples) - 1, -1, -1)))


def test_changed_samples_are_scored_in_the_step(tmp_path, caplog):
    reward, file = notes(tmp_path)
    pipelined(tmp_path, reward, f"algorithm={__file__}:Reorders", "data.eval=", "trainer.log_samples=1000")

    lines = [json.loads(line) for line in (tmp_path / "r" / "samples.jsonl").read_text().splitlines()]
    assert [it["reward"] for it in lines] == [it["sample_id"] + len(it["completion"]) / 16 for it in lines]
    warnings = [it.message for it in caplog.records if "requested ahead" in it.message]
    assert len(warnings) == 1
    assert "the rewards of 8 prompts were requested ahead, but the algorithm did not score" in warnings[0]
    assert len(file.read_text().split()) == (4 + 1) * 32, "only those of the second step are computed twice"
