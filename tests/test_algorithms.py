"""GRPO and PPO with fake roles that record calls: columns, calls and their order, and the loss."""

import math
from dataclasses import replace
from itertools import chain, pairwise

import pytest
import torch

from rlcore.algorithms.entropy import AdaptiveEntropyConfig
from rlcore.algorithms.grpo import GRPO, GRPOConfig
from rlcore.algorithms.kl import KLConfig
from rlcore.algorithms.ppo import PPO, PPOConfig
from rlcore.config.build import build
from rlcore.config.schema import RewardConfig
from rlcore.controller.group import Group
from rlcore.controller.pool import RuntimeConfig
from rlcore.controller.runtime import LocalRuntime
from rlcore.data.batch import Batch
from rlcore.errors import ColumnError, ConfigError, RlcoreError
from rlcore.trainer.roles import Roles
from rlcore.trainer.step import Step
from rlcore.types import Counts, Mean, Sampling, TokenOutputs
from rlcore.workers.critic import CriticWorker
from rlcore.workers.policy import ReferenceWorker

PENALTY = KLConfig(coefficient=0.1)
IN_REWARD = KLConfig(coefficient=0.1, where="reward", estimator="k1")


class Future:
    def __init__(self, log, name, value):
        self.log, self.name, self.value = log, name, value

    def result(self):
        self.log.append(f"{self.name}.result")
        return self.value


class Update:
    """Fake update method that keeps its arguments in `taken`."""

    def __init__(self, log, name):
        self.log, self.name, self.taken = log, name, []

    def submit(self, batch, counts):
        self.log.append(f"{self.name}.update")
        self.taken.append((batch, counts))
        return Future(self.log, self.name, {"loss": Mean(float(len(self.taken)), 1.0)})


class FakeGroup:
    """Fake worker group: every method logs its name and returns made-up columns."""

    def __init__(self, log, name, dp_size=1):
        self.log, self.name, self.dp_size = log, name, dp_size
        self.update = Update(log, name)

    def log_probs(self, batch):
        self.log.append(f"{self.name}.log_probs")
        if self.name == "reference":
            return Batch.of(lengths=batch.lengths, tokens={"ref_log_probs": batch["input_ids"] / -10})
        tokens = {"log_probs": batch["input_ids"] / -20, "entropy": torch.ones(batch.num_tokens)}
        return Batch.of(lengths=batch.lengths, tokens=tokens)

    def values(self, batch):
        self.log.append(f"{self.name}.values")
        return Batch.of(lengths=batch.lengths, tokens={"values": torch.full((batch.num_tokens,), 0.5)})

    def apply(self, function, batch, **options):
        self.log.append(f"{self.name}.apply")
        return function(batch, **options)


class FakeRoles:
    """Fake roles with two one-token prompts and two responses each, of 1, 2, 3 and 1 tokens."""

    def __init__(self, algorithm, rewards=(0.0, 1.0, 0.5, 0.5), dp_size=1):
        self.log, self.metrics = [], {}
        self.rewards = torch.tensor(rewards)
        for role in algorithm.roles():
            if role.name != "rollout":
                setattr(self, role.name, FakeGroup(self.log, role.name, dp_size))

    def generate(self, prompts):
        self.log.append("generate")
        samples = Batch.of(
            lengths=[2, 3, 4, 2],
            tokens={
                "input_ids": [9, 1, 9, 2, 3, 8, 4, 5, 6, 8, 7],
                "loss_mask": [n in (1, 3, 4, 6, 7, 8, 10) for n in range(11)],
                "rollout_log_probs": torch.zeros(11),
            },
            rows={"group_id": [0, 0, 1, 1], "sample_id": [0, 1, 2, 3], "num_loss_tokens": [1, 2, 3, 1]},
        )
        return samples.take([0, 3, 1, 2])  # groups not adjacent, shortest first

    def score(self, samples):
        self.log.append("score")
        return samples.with_rows(reward=self.rewards[samples["sample_id"]])

    def note(self, name, mean):
        self.metrics[name] = mean


def collect(algorithm, **options):
    roles = FakeRoles(algorithm, **options)
    return roles, algorithm.collect(roles, None)


ADAPTIVE = AdaptiveEntropyConfig(target=0.5)


def grpo(**settings):
    return GRPO(GRPOConfig(**settings))


def ppo(**settings):
    return PPO(PPOConfig(**settings))


@pytest.mark.parametrize(
    ("algorithm", "calls"),
    [
        pytest.param(grpo(), ["generate", "score"], id="grpo-on-policy-needs-no-forward"),
        pytest.param(grpo(epochs=2), ["generate", "score", "actor.log_probs"], id="grpo-of-two-epochs"),
        pytest.param(grpo(minibatches=2), ["generate", "score", "actor.log_probs"], id="grpo-of-two-minibatches"),
        pytest.param(grpo(kl=PENALTY), ["generate", "score", "reference.log_probs"], id="grpo-with-kl-in-the-loss"),
        pytest.param(
            grpo(kl=IN_REWARD),
            ["generate", "score", "actor.log_probs", "reference.log_probs", "actor.apply"],
            id="grpo-with-kl-in-the-reward",
        ),
        pytest.param(ppo(), ["generate", "score", "actor.log_probs", "critic.values", "critic.apply"], id="ppo"),
        pytest.param(
            ppo(kl=IN_REWARD),
            ["generate", "score", "actor.log_probs", "reference.log_probs", "critic.values", "critic.apply"],
            id="ppo-with-kl",
        ),
    ],
)
def test_collect_makes_only_the_calls_that_its_settings_need(algorithm, calls):
    roles, _ = collect(algorithm)

    assert roles.log == calls


@pytest.mark.parametrize(
    ("kl", "needed"),
    [
        (KLConfig(), False),
        (KLConfig(where="reward"), False),
        (KLConfig(coefficient=1e-4), True),
        (IN_REWARD, True),
        (KLConfig(monitor=True), True),
    ],
)
@pytest.mark.parametrize("make", [grpo, ppo])
def test_a_reference_is_requested_only_for_a_penalty_or_for_monitoring(make, kl, needed):
    names = [role.name for role in make(kl=kl).roles()]

    assert ("reference" in names) is needed
    assert ("critic" in names) is (make is ppo)
    assert {"actor", "rollout"} <= set(names)


VARIANTS = [
    pytest.param(grpo(), id="grpo"),
    pytest.param(grpo(epochs=2), id="grpo-off-policy"),
    pytest.param(grpo(kl=PENALTY), id="grpo-kl"),
    pytest.param(grpo(kl=IN_REWARD, minibatches=2), id="grpo-kl-in-reward"),
    pytest.param(grpo(adaptive_entropy=ADAPTIVE), id="grpo-entropy"),
    pytest.param(ppo(), id="ppo"),
    pytest.param(ppo(adaptive_entropy=ADAPTIVE), id="ppo-entropy"),
    pytest.param(ppo(kl=PENALTY, epochs=2), id="ppo-kl"),
    pytest.param(ppo(kl=IN_REWARD), id="ppo-kl-in-reward"),
]


def outputs(batch):
    values = torch.linspace(-1, 0, batch.num_tokens)
    return TokenOutputs(log_probs=values.clone().requires_grad_(), entropy=values**2, values=values)


@pytest.mark.parametrize("algorithm", VARIANTS)
def test_collect_adds_exactly_the_declared_columns(algorithm):
    _, experience = collect(algorithm)
    given = {*FakeRoles(algorithm).generate(None).columns, "reward", "ref_log_probs", "values"}

    assert set(experience.columns) - given == set(algorithm.writes())


@pytest.mark.parametrize("algorithm", VARIANTS)
def test_losses_read_exactly_the_declared_columns(algorithm):
    _, experience = collect(algorithm)
    losses = {"actor": algorithm.loss, "critic": getattr(algorithm, "value_loss", None)}
    for role, columns in algorithm.reads().items():
        loss, batch = losses[role], experience.select("input_ids", "loss_mask", *columns)

        assert loss(outputs(batch), batch).terms.shape == (batch.num_tokens,)

        for column in columns:
            with pytest.raises(ColumnError, match=column):
                loss(outputs(batch), batch.drop(column))


@pytest.mark.parametrize("algorithm", VARIANTS)
def test_losses_do_not_mix_the_samples_of_a_micro_batch(algorithm):
    _, experience = collect(algorithm)
    out = outputs(experience)
    whole = algorithm.loss(out, experience).terms
    offsets = experience.offsets().tolist()

    for row, (start, stop) in enumerate(pairwise(offsets)):
        part = TokenOutputs(log_probs=out.log_probs[start:stop], entropy=out.entropy[start:stop])

        assert torch.equal(algorithm.loss(part, experience.take([row])).terms, whole[start:stop])


def test_grpo_compares_within_groups():
    # rewards 0, 1: mean 1/2, std sqrt(1/2): ±1/sqrt(2); rewards 0.5, 0.5: 0
    _, experience = collect(grpo())

    by_sample = dict(zip(experience["sample_id"].tolist(), experience["advantage"].tolist()))

    assert by_sample == pytest.approx({0: -1 / math.sqrt(2), 1: 1 / math.sqrt(2), 2: 0, 3: 0}, abs=1e-5)


def test_grpo_without_std_only_centers():
    _, experience = collect(grpo(normalize_by_std=False))

    by_sample = dict(zip(experience["sample_id"].tolist(), experience["advantage"].tolist()))

    assert by_sample == {0: -0.5, 1: 0.5, 2: 0, 3: 0}


def test_grpo_subtracts_kl_from_the_reward_of_the_response():
    # k1 = old - ref = id/10 - id/20 = id/20, summed over ids 1 | 2, 3 | 4, 5, 6 | 7: 0.05, 0.25, 0.75, 0.35
    # rewards - 0.1 · KL: -0.005, 0.975 | 0.425, 0.465; centered: ∓0.49 | ∓0.02
    algorithm = grpo(kl=IN_REWARD, normalize_by_std=False)
    _, experience = collect(algorithm)

    by_sample = dict(zip(experience["sample_id"].tolist(), experience["advantage"].tolist()))

    assert by_sample == pytest.approx({0: -0.49, 1: 0.49, 2: -0.02, 3: 0.02}, abs=1e-6)


def test_adaptive_kl_changes_the_coefficient_of_the_next_step():
    # mean KL per response 0.35 against a target of 0.1: error bounded by 0.2; 4 responses over a horizon of 40
    kl = replace(IN_REWARD, controller="adaptive", target=0.1, horizon=40.0)
    for algorithm in (grpo(kl=kl), ppo(kl=kl)):
        collect(algorithm)

        assert algorithm.kl.coefficient == pytest.approx(0.1 * (1 + 0.2 * 4 / 40))


@pytest.mark.parametrize(("skip", "kept"), [(False, [0, 1, 2, 3]), (True, [0, 1])])
def test_groups_without_variance_are_counted_and_optionally_skipped(skip, kept):
    algorithm = grpo(skip_zero_variance_groups=skip)
    roles, experience = collect(algorithm)

    assert sorted(experience["sample_id"].tolist()) == kept
    assert roles.metrics["experience/zero_variance_rows"].value == 2


@pytest.mark.parametrize(("mask", "trained", "masked"), [(False, [0, 1, 2, 3], None), (True, [0, 3], 5)])
@pytest.mark.parametrize("make", [grpo, ppo])
def test_truncated_responses_are_left_out_of_the_losses_and_not_of_the_baseline(make, mask, trained, masked):
    algorithm = make(mask_truncated=mask)
    roles, experience = collect(algorithm, rewards=(0.0, 1.0, 0.25, 0.75))
    experience = experience.with_rows(truncated=(experience["sample_id"] == 1) | (experience["sample_id"] == 2))

    algorithm.update(roles, experience)

    for role in algorithm.reads():
        ((batch, counts),) = getattr(roles, role).update.taken
        assert sorted(batch["sample_id"].tolist()) == trained
        assert counts == (Counts(rows=2, tokens=2, units=2) if mask else Counts(rows=4, tokens=7, units=4))
    assert len(experience) == 4
    if make is grpo:  # sample 0 is compared with sample 1, which is masked
        advantage = dict(zip(experience["sample_id"].tolist(), experience["advantage"].tolist()))
        assert advantage[0] == pytest.approx(-advantage[1])
        assert advantage[0] < 0
    noted = roles.metrics.get("experience/masked_tokens")
    assert (noted and noted.value) == masked


def test_a_step_whose_responses_are_all_truncated_makes_no_update():
    algorithm = grpo(mask_truncated=True)
    roles, experience = collect(algorithm)

    metrics = algorithm.update(roles, experience.with_rows(truncated=torch.ones(4, dtype=torch.bool)))

    assert roles.actor.update.taken == []
    assert metrics["actor/updates"].value == 0


def test_update_without_samples_makes_no_step():
    algorithm = grpo(skip_zero_variance_groups=True)
    roles, experience = collect(algorithm, rewards=(1.0, 1.0, 0.0, 0.0))

    metrics = algorithm.update(roles, experience)

    assert len(experience) == 0
    assert roles.actor.update.taken == []
    assert metrics["actor/updates"].value == 0


def test_ppo_whitens_over_all_loss_tokens_of_the_step():
    algorithm = ppo()
    _, experience = collect(algorithm)

    white = algorithm.advantages(experience)[experience["loss_mask"]]

    assert white.mean().item() == pytest.approx(0, abs=1e-6)
    assert white.std(unbiased=False).item() == pytest.approx(1, abs=1e-6)


def test_ppo_without_whitening_keeps_the_advantages():
    # values are 0.5, gamma is 1: A of the last token is reward - 0.5; A of an earlier token is 0.95 times the next one
    algorithm = ppo(whiten=False)
    _, experience = collect(algorithm)
    row = experience["sample_id"].tolist().index(1)

    advantages = algorithm.advantages(experience.take([row]))

    assert advantages.tolist() == pytest.approx([0, 0.95 * 0.5, 0.5])


def test_splitting_a_step_does_not_change_whitened_advantages():
    algorithm = ppo(minibatches=2)
    _, experience = collect(algorithm)

    parts = [algorithm.advantages(part) for part in experience.split([1, 3])]

    assert torch.equal(torch.cat(parts), algorithm.advantages(experience))


@pytest.mark.parametrize("make", [grpo, ppo])
@pytest.mark.parametrize(("epochs", "minibatches"), [(1, 1), (1, 3), (3, 1), (2, 3), (1, 9)])
def test_each_epoch_uses_every_sample_once(make, epochs, minibatches):
    algorithm = make(epochs=epochs, minibatches=minibatches)
    roles, experience = collect(algorithm)

    metrics = algorithm.update(roles, experience)

    steps = min(minibatches, 4)
    for role in algorithm.reads():
        taken = [batch["sample_id"].tolist() for batch, _ in getattr(roles, role).update.taken]
        assert len(taken) == epochs * steps
        for epoch in range(epochs):
            passed = taken[epoch * steps : (epoch + 1) * steps]
            assert sorted(chain.from_iterable(passed)) == [0, 1, 2, 3]
    assert metrics["actor/updates"].value == epochs * steps
    assert metrics["actor/loss"].weight == epochs * steps


def test_minibatches_do_not_depend_on_the_order_of_the_rows():
    orders = []
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        algorithm = grpo(minibatches=2, epochs=8)
        roles, experience = collect(algorithm)
        algorithm.update(roles, experience.take(order))
        orders.append([set(batch["sample_id"].tolist()) for batch, _ in roles.actor.update.taken])

    assert orders[0] == orders[1]
    assert len({frozenset(ids) for ids in orders[0]}) > 2


def test_update_gets_the_counts_of_its_minibatch():
    algorithm = grpo(minibatches=2)
    roles, experience = collect(algorithm)

    algorithm.update(roles, experience)

    for batch, counts in roles.actor.update.taken:
        assert (counts.rows, counts.tokens) == (2, int(batch["loss_mask"].sum()))


def test_all_updates_are_sent_before_the_first_result_is_awaited():
    algorithm = ppo(epochs=2)
    roles, experience = collect(algorithm)
    roles.log.clear()

    algorithm.update(roles, experience)

    assert roles.log == ["actor.update", "critic.update"] * 2 + ["actor.result", "critic.result"] * 2


@pytest.mark.parametrize("make", [grpo, ppo])
def test_steps_and_minibatches_are_balanced_by_number_of_tokens(make):
    algorithm = make()
    roles, experience = collect(algorithm, dp_size=2)
    shortest_first = experience.take(experience.lengths.argsort())

    algorithm.update(roles, shortest_first)

    ((batch, _),) = roles.actor.update.taken
    for balanced in (experience, batch):
        assert [part.num_tokens for part in balanced.split([2, 2])] == [6, 5]
    assert [part.num_tokens for part in shortest_first.split([2, 2])] == [4, 7]


def order_of_updates(algorithm, times):
    seen = []
    for _ in range(times):
        roles, experience = collect(algorithm)
        algorithm.update(roles, experience)
        seen.append([batch["sample_id"].tolist() for batch, _ in roles.actor.update.taken])
    return seen


def test_a_resumed_run_has_the_same_order_as_an_uninterrupted_one():
    settings = {"minibatches": 4, "epochs": 2}
    whole = order_of_updates(grpo(**settings), 6)
    first, second = grpo(**settings), grpo(**settings)
    early = order_of_updates(first, 3)

    second.load_state_dict(first.state_dict())

    assert early + order_of_updates(second, 3) == whole
    assert len({str(epoch) for update in whole for epoch in (update[:4], update[4:])}) > 6


def one_token(**columns):
    return Batch.of(lengths=[1], tokens={"input_ids": [5], "loss_mask": [True], **columns}, rows={"advantage": [2.0]})


@pytest.mark.parametrize(
    ("settings", "columns", "term", "gradient"),
    [
        # on policy the ratio is 1: -A
        pytest.param({}, {}, -2.0, -2.0, id="plain"),
        pytest.param({"entropy_coefficient": 0.5}, {}, -2.0 - 0.5 * 3, -2.0, id="entropy-bonus"),
        # old log p = -1 - log 1.1: ratio 1.1, -2.2
        pytest.param({"epochs": 2}, {"old_log_probs": -1 - math.log(1.1)}, -2.2, -2.2, id="off-policy"),
        # ratio 1.5 is clipped to 1.2
        pytest.param({"epochs": 2}, {"old_log_probs": -1 - math.log(1.5)}, -2.4, 0.0, id="clipped"),
        # k2: 0.1 · (log p - log ref)² / 2 = 0.05, its gradient 0.1 · 1
        pytest.param(
            {"kl": KLConfig(coefficient=0.1, estimator="k2")}, {"ref_log_probs": -2.0}, -1.95, -1.9, id="kl-in-the-loss"
        ),
        pytest.param({"kl": KLConfig(monitor=True)}, {"ref_log_probs": -2.0}, -2.0, -2.0, id="kl-only-monitored"),
        pytest.param({"kl": IN_REWARD}, {"ref_log_probs": -2.0}, -2.0, -2.0, id="kl-in-the-reward-is-not-in-the-loss"),
    ],
)
def test_loss_of_one_token(settings, columns, term, gradient):
    log_probs = torch.tensor([-1.0], requires_grad=True)
    batch = one_token(**{name: torch.tensor([value]) for name, value in columns.items()})

    loss = grpo(**settings).loss(TokenOutputs(log_probs=log_probs, entropy=torch.tensor([3.0])), batch)
    loss.terms.sum().backward()

    assert (loss.terms.item(), log_probs.grad.item()) == pytest.approx((term, gradient))
    assert loss.metrics["entropy"].item() == 3.0
    assert loss.average == "token-mean"


def test_value_loss_of_ppo_by_hand():
    # V = 1, old 0, R = 3, clip 0.2: 0.5 · (0.2 - 3)² = 3.92
    batch = one_token(values=torch.tensor([0.0]), returns=torch.tensor([3.0]))

    loss = ppo().value_loss(TokenOutputs(values=torch.tensor([1.0])), batch)

    assert loss.terms.item() == pytest.approx(3.92)
    assert {name: metric.item() for name, metric in loss.metrics.items()} == {
        "clip_fraction": 1, "value": 1, "squared_error": 4,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"epochs": 0}, "epochs"),
        ({"minibatches": 0}, "minibatches"),
        ({"average": "row-mean"}, "average"),
        ({"average": "mean"}, "average"),
        ({"clip_low": -0.1}, "clip_low"),
        ({"clip_high": -0.1}, "clip_high"),
        ({"dual_clip": 0.5}, "dual_clip"),
        ({"gamma": 1.1}, "gamma"),
        ({"lam": -0.1}, "lam"),
        ({"clip_value": -1.0}, "clip_value"),
        ({"kl": {"coefficient": -1.0}}, "kl.coefficient"),
        ({"kl": {"controller": "adaptive"}}, "kl.where"),
        ({"kl": {"estimator": "k4"}}, "kl.estimator"),
        ({"kl": {"sync_every_steps": -1}}, "kl.sync_every_steps"),
        ({"kl": {"sync_every_steps": 5}}, "kl.coefficient"),
        ({"kl": {"coefficient": 0.1, "sync_mix": 0.0}}, "kl.sync_mix"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_key(settings, key):
    with pytest.raises(ConfigError, match=rf"^algorithm\.{key}: expected .*\nType  algorithm\.{key}=\S+$"):
        build(PPOConfig, settings, "algorithm")


class ScoringGroup:
    """Fake reward role with fixed outcomes: a score, a timeout, a score, a skip."""

    def recording(self, *_):
        return self

    def score(self, samples):
        failure, more = ("slow", "10 s", {}), (None, None, {"slow/steps": 4.0})
        return Batch.of(
            lengths=samples.lengths,
            rows={
                "reward": [1.0, math.nan, 3.0, math.nan],
                "reward_status": [0, 2, 0, 1],
                "reward_has_note": [False, True, True, False],
                "reward_note": [None, failure, more, None],
                "reward:slow": [2.0, math.nan, 6.0, math.nan],
            },
        )


def scoring_roles(on_error, seen=None):
    groups = {"reward": ScoringGroup()}
    note = None if seen is None else lambda step, batch: seen.append((step.number, batch))
    reward = RewardConfig(on_error=on_error)
    return Roles(groups, sampling=Sampling(), samples_per_prompt=2, reward=reward, on_scored=note, step=Step(number=3))


def samples_to_score():
    samples = FakeRoles(grpo()).generate(None)
    return samples.take(samples["sample_id"].argsort()).with_rows(
        prompt_id=[0, 0, 1, 1], truncated=[True, False, False, False]
    )


@pytest.mark.parametrize(
    ("on_error", "kept", "rewards"), [("zero", [0, 1, 2], [1.0, 0.0, 3.0]), ("drop", [0, 2], [1.0, 3.0])]
)
def test_samples_without_a_score_are_dropped_and_counted(on_error, kept, rewards):
    seen = []
    roles = scoring_roles(on_error, seen)

    samples = roles.score(samples_to_score())

    assert samples["sample_id"].tolist() == kept
    assert samples["reward"].tolist() == rewards
    assert [(number, len(batch)) for number, batch in seen] == [(3, 4)]
    assert roles.step.scored is seen[0][1]
    metrics = {name: mean.value for name, mean in roles.step.metrics.items()}
    assert metrics["reward/mean"] == sum(rewards) / len(rewards)
    assert (metrics["reward/slow"], metrics["reward/num_timeout"], metrics["reward/num_skip"]) == (4.0, 1, 1)
    assert metrics["reward/slow/steps"] == 4.0
    assert metrics["response_length/truncated"] == 0.25


def test_a_failed_reward_ends_the_run_by_default():
    with pytest.raises(RlcoreError, match="slow"):
        scoring_roles("raise").score(samples_to_score())


def test_access_to_a_role_that_was_not_requested_is_an_error_with_its_name():
    with pytest.raises(AttributeError, match=r"no role 'critic'; its algorithm asked for reward"):
        scoring_roles("drop").critic  # noqa: B018


def test_a_group_of_another_worker_class_is_refused():
    group = Group(ReferenceWorker, LocalRuntime(RuntimeConfig(name="local")), role="teacher", pool="main", meshes=[])
    roles = Roles({"teacher": group}, sampling=Sampling(), samples_per_prompt=2, reward=RewardConfig())

    assert roles.group("teacher", ReferenceWorker).worker_class is ReferenceWorker
    with pytest.raises(TypeError, match=r"role 'teacher' has workers of ReferenceWorker, not CriticWorker"):
        roles.group("teacher", CriticWorker)
    with pytest.raises(AttributeError, match=r"no role 'techer'"):
        roles.group("techer", ReferenceWorker)
