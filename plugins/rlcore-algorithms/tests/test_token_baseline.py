"""The optimal token baseline: a hand-worked table, the published formula in a loop, and the sum of squares."""

import math

import pytest
import torch
from rlcore_algorithms.optimal_token_baseline import OptimalTokenBaseline
from rlcore_algorithms.token_baseline import baseline_advantages, path_weight, token_advantages

from rlcore.backends.local import LocalBackend, LocalConfig
from rlcore.controller.ref import BatchRef
from rlcore.data.batch import Batch
from rlcore.models.load import load_model
from rlcore.protocols import BackendContext, ModelConfig, OptimizerConfig
from rlcore.testing import FakeRoles
from rlcore.testing.training import make_batch, save_model


def columns(rows):
    """Return old and half log-probs for rows of (p, Σ p²) of each token: p at half the temperature is p² / Σ p²."""
    flat = [token for row in rows for token in row]
    p, squares = torch.tensor(flat, dtype=torch.float64).unbind(1)
    return {"old_log_probs": p.log(), "half_log_probs": (p**2 / squares).log()}


def test_advantages_of_a_hand_worked_group():
    """Two responses to one prompt, with rewards 1 and 0, of 2 and 3 tokens; and a response to another prompt.

    w = 1 - 2 p + Σ p²:  first response 0.5 and 0.75, so W is 0.5 and 1.25; second 1.0, 0.25 and 0.5: 1.0, 1.25, 1.75.
    Baselines: 0.5 / 1.5, 1.25 / 2.5 and, with one response left, its own reward.
    """
    prompt = [(1.0, 1.0)]
    first, second = [(0.5, 0.5), (0.25, 0.25)], [(0.125, 0.25), (0.75, 0.75), (0.5, 0.5)]
    rows = [prompt + first, prompt + second, prompt + first]
    mask = [False, True, True, False, True, True, True, False, True, True]
    batch = Batch.of(
        lengths=[3, 4, 3],
        tokens={"loss_mask": torch.tensor(mask), **columns(rows)},
        rows={"unit_id": [7, 7, 3], "return": torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64)},
    )

    found = token_advantages(batch)["advantages"]

    assert found.tolist() == pytest.approx([0, 2 / 3, 1 / 2, 0, -1 / 3, -1 / 2, 0, 0, 0, 0], abs=1e-6)


def test_a_baseline_without_weights_is_the_mean():
    """Tokens with probability 1 have no gradient, so no response weighs more."""
    batch = Batch.of(
        lengths=[1, 1],
        tokens={"loss_mask": torch.tensor([True, True]), **columns([[(1.0, 1.0)], [(1.0, 1.0)]])},
        rows={"unit_id": [0, 0], "return": torch.tensor([1.0, 0.0], dtype=torch.float64)},
    )

    assert token_advantages(batch)["advantages"].tolist() == pytest.approx([0.5, -0.5])


def step():
    """Return 12 scored samples of three prompts in random order, with prompts and observations outside the mask."""
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(2, 9, (12,), generator=generator)
    total = int(lengths.sum())
    mask = torch.rand(total, generator=generator) < 0.7
    p = torch.rand(total, generator=generator, dtype=torch.float64)
    return Batch.of(
        lengths=lengths,
        tokens={"loss_mask": mask, "old_log_probs": p.log(), "input_ids": torch.arange(total)},
        rows={
            "group_id": torch.arange(3).repeat(4)[torch.randperm(12, generator=generator)],
            "reward": torch.rand(12, generator=generator),
        },
    )


def published(batch, squares):
    """Compute the advantages one token at a time."""
    rows = []
    for ids, mask, log_probs in zip(
        *(batch[name].split(batch.lengths.tolist()) for name in ("input_ids", "loss_mask", "old_log_probs")),
        strict=True,
    ):
        weights, path = [], 0.0
        for token, log_prob in zip(ids[mask].tolist(), log_probs[mask].tolist(), strict=True):
            path += 1 - 2 * math.exp(log_prob) + squares[token]
            weights.append(path)
        rows.append(weights)
    groups, rewards = batch["group_id"].tolist(), batch["reward"].tolist()
    found = []
    for weights, group, reward in zip(rows, groups, rewards, strict=True):
        for t in range(len(weights)):
            others = [i for i, other in enumerate(rows) if groups[i] == group and len(other) > t]
            baseline = sum(rewards[i] * rows[i][t] for i in others) / sum(rows[i][t] for i in others)
            found.append(reward - baseline)
    return found


def test_advantages_agree_with_the_published_formula_whatever_the_order_of_the_rows():
    batch, roles = step(), FakeRoles(["actor"])
    squares = (batch["old_log_probs"].exp() ** 2 + 0.1).clamp(max=1.0)
    half = 2 * batch["old_log_probs"] - squares.log()

    def log_probs(samples, temperature_factor=1.0):
        assert temperature_factor == 0.5
        ids = samples.local()["input_ids"]
        return Batch.of(lengths=samples.local().lengths, tokens={"log_probs": half[ids]})

    roles.actor.log_probs = log_probs
    samples = BatchRef.publish(batch, roles.store)

    found = baseline_advantages(roles, samples, batch["reward"]).local()

    assert found["input_ids"].tolist() == batch["input_ids"].tolist()
    assert not found["advantages"][~batch["loss_mask"]].any()
    wanted = published(batch, squares.tolist())
    assert found["advantages"][batch["loss_mask"]].tolist() == pytest.approx(wanted, abs=1e-6)


def test_log_probs_at_half_the_temperature_give_the_norm_of_the_gradient_for_the_logits(tmp_path):
    path, batch, temperature = save_model("qwen2", tmp_path), make_batch(), 0.7
    backend = LocalBackend(
        LocalConfig(), model=ModelConfig(path=path), optimizer=OptimizerConfig(), context=BackendContext(trained=False)
    )
    mask = batch["loss_mask"].clone()
    mask[batch.offsets()[:-1]] = False  # no hidden state precedes the first token
    log_probs, half = (backend.forward(batch, temperature=temperature * it).log_probs[mask] for it in (1.0, 0.5))
    wanted, model = [], load_model(path)
    for ids, in_loss in zip(*(batch[name].split(batch.lengths.tolist()) for name in ("input_ids", "loss_mask"))):
        logits = model(ids[None]).logits[0, :-1].detach().requires_grad_()
        for t in in_loss[1:].nonzero().squeeze(1).tolist():
            (gradient,) = torch.autograd.grad((logits[t] / temperature).log_softmax(-1)[ids[t + 1]], logits)
            wanted.append(float((gradient**2).sum()) * temperature**2)

    found = path_weight(log_probs, half, torch.arange(len(log_probs)))

    assert found.tolist() == pytest.approx(wanted, abs=1e-5)


def test_old_log_probs_are_computed_even_on_policy():
    assert OptimalTokenBaseline(OptimalTokenBaseline.Config()).writes() == ["advantages", "old_log_probs"]
