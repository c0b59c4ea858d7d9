"""The distance between a policy and the policies that sampled: tokens that count, and updates that report it."""

import pytest
import torch

from rlcore.controller.make import make_runtime
from rlcore.controller.pool import PoolConfig, RuntimeConfig
from rlcore.controller.transfer import InProcess, ObjectStore
from rlcore.testing.training import make_batch, save_model
from rlcore.workers.averaging import count
from rlcore.workers.policy import PolicyWorker, ReferenceWorker
from tests.workers import model_group

LOSS_TOKENS = [7, 2, 10, 0, 5, 3, 9, 1]
"""Number of loss tokens of each sample of make_batch()."""


class Engine(ReferenceWorker):
    """Worker of a role that samples with the weights that it receives."""

    updated_every_step = True


@pytest.fixture
def actor(tmp_path):
    runtime = make_runtime(RuntimeConfig(name="local"))
    runtime.start({name: PoolConfig(device="cpu") for name in ("a", "b")}, {})
    return model_group(PolicyWorker, runtime, "a", save_model("qwen3", tmp_path / "model"))


def sampled(actor, versions, gaps, *columns):
    """Return samples of these versions whose log-probs differ from those of the policy by these gaps."""
    batch = make_batch().with_rows(first_version=versions, advantage=[1.0, -1.0] * 4, gap=gaps)
    now = actor.log_probs(batch).local()["log_probs"]
    log_probs = torch.where(batch["loss_mask"], now + batch.per_token("gap"), 0.0)
    return batch.with_tokens(rollout_log_probs=log_probs, **dict.fromkeys(columns, now))


def gaps_of(actor, batch):
    metrics = actor.update(batch, count(batch["num_loss_tokens"]))
    return {name: mean.value for name, mean in metrics.items() if name.endswith("_gap")}


def send(actor, worker, way, version, tmp_path):
    pool = "a" if way is InProcess else "b"
    way(source=actor, target=model_group(worker, actor.runtime, pool, str(tmp_path / "model"))).send(version)


def test_the_gap_counts_only_samples_of_the_newest_version(actor):
    batch = sampled(actor, [0, 0, -1, 0, -1, 0, 0, 0], [0.5, 0.0, 0.25, 9.0, 1.0, 0.0, 0.0, 0.0])

    found = gaps_of(actor, batch)

    fresh, old = 7 * 0.5, 10 * 0.25 + 5 * 1.0
    assert found["rollout_logprob_gap"] == pytest.approx(fresh / (7 + 2 + 3 + 9 + 1), rel=1e-4)
    assert found["policy_gap"] == pytest.approx((fresh + old) / sum(LOSS_TOKENS), rel=1e-4)


def test_log_probs_at_a_multiple_of_the_temperature(actor):
    """At half the temperature, the log-probs differ from twice those at the temperature by log Σ p² of the token."""
    batch = make_batch()
    whole, half = (actor.log_probs(batch, factor).local() for factor in (1.0, 0.5))
    mask = batch["loss_mask"]
    squares = (2 * whole["log_probs"] - half["log_probs"])[mask].exp()

    assert (half["entropy"] < whole["entropy"])[mask].all()
    assert (squares >= whole["log_probs"][mask].exp() ** 2 - 1e-6).all()
    assert ((squares > 0) & (squares < 1)).all()
    assert not half["log_probs"][~mask].any()


def test_without_a_fresh_token_there_is_no_gap(actor):
    batch = sampled(actor, [-1, -1, -1, 0, -1, -1, -1, -1], [0.5] * 8)

    assert gaps_of(actor, batch) == {"policy_gap": pytest.approx(0.5, rel=1e-4)}


@pytest.mark.parametrize("way", [InProcess, ObjectStore])
def test_weights_sent_to_a_model_do_not_make_an_updated_policy_equal_to_its_engine(actor, way, tmp_path):
    batch = sampled(actor, [0] * 8, [0.5] * 8)
    first = gaps_of(actor, batch)

    send(actor, ReferenceWorker, way, 1, tmp_path)

    assert list(first) == ["policy_gap", "rollout_logprob_gap"]
    assert gaps_of(actor, batch) == {}


@pytest.mark.parametrize("way", [InProcess, ObjectStore])
def test_an_engine_with_new_weights_starts_a_new_version(actor, way, tmp_path):
    before = sampled(actor, [0] * 8, [0.5] * 8)
    gaps_of(actor, before)

    send(actor, Engine, way, 1, tmp_path)
    new = sampled(actor, [1] * 8, [0.125] * 8)
    assert gaps_of(actor, new)["rollout_logprob_gap"] == pytest.approx(0.125, rel=1e-4)
    assert gaps_of(actor, new) == {}, "it has no old_log_probs, and the policy was updated"

    old = sampled(actor, [0] * 8, [0.25] * 8, "old_log_probs")
    assert gaps_of(actor, old) == {"policy_gap": pytest.approx(0.25, rel=1e-4)}
