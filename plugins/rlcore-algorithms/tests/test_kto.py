"""KTO: a hand-worked table, the gradient of plain PyTorch, and the pairs of the reference point."""

import math

import pytest
import torch
from rlcore_algorithms.kto import KTO

from rlcore.backends.local import LocalBackend, LocalConfig
from rlcore.data.batch import Batch
from rlcore.errors import ConfigError
from rlcore.models.load import load_model
from rlcore.protocols import BackendContext, ModelConfig, OptimizerConfig
from rlcore.testing import FakeRoles
from rlcore.testing.training import make_batch, save_model
from rlcore.types import Mean, TokenOutputs
from rlcore.workers.averaging import count, reduce_metrics, reduce_terms


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_the_loss_is_the_value_that_each_response_falls_short_of_its_weight():
    """With z = 0.2: r - z is 0.4, -0.6 and -0.4; beta is 0.5."""
    mask = torch.tensor([0, 1, 1, 0, 1, 0, 1, 1], dtype=torch.bool)
    log_probs = torch.tensor([7.0, -0.2, -0.5, 7.0, -1.4, 7.0, -0.6, -0.7], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.0, -0.5, -0.8, 0.0, -1.0, 0.0, -0.5, -0.6], dtype=torch.float64)
    batch = Batch.of(
        lengths=[3, 2, 3],
        tokens={"loss_mask": mask, "ref_log_probs": ref},
        rows={"desirable": torch.tensor([True, False, True]), "reference_point": torch.full((3,), 0.2)},
    )

    algorithm = KTO(KTO.Config(beta=0.5, desirable_weight=1.5, undesirable_weight=0.8))
    terms = algorithm.loss(TokenOutputs(log_probs=log_probs), batch)
    loss = reduce_terms(terms, batch, count(torch.tensor([2, 1, 2])))
    loss.backward()

    # 1.5 · sigmoid(-0.2), 0.8 · sigmoid(-0.3), 1.5 · sigmoid(0.2)
    wanted = [1.5 * 0.450166, 0.8 * 0.425557, 1.5 * 0.549834]
    assert terms.terms.tolist() == pytest.approx(wanted, abs=1e-6)
    assert loss.item() == pytest.approx(sum(wanted) / 3, abs=1e-6)
    # d sigmoid(x) = sigmoid(x) sigmoid(-x); each good token gains, each bad one loses
    slopes = [weight * 0.5 * sigmoid(x) * sigmoid(-x) / 3 for weight, x in ((1.5, 0.2), (0.8, 0.3), (1.5, 0.2))]
    up, down, up_too = -slopes[0], slopes[1], -slopes[2]
    assert log_probs.grad.tolist() == pytest.approx([0, up, up, 0, down, 0, up_too, up_too], abs=1e-7)
    metrics = reduce_metrics(terms.metrics, batch)
    assert metrics["margin"].value == pytest.approx((0.2 + 0.3 - 0.2) / 3, abs=1e-6)
    assert metrics["accuracy"] == Mean(2.0, 3.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model("qwen2", tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("max_tokens", [16384, 30, 1], ids=lambda number: f"{number}-tokens")
def test_one_pass_has_the_gradient_of_plain_pytorch(model, max_tokens):
    batch = make_batch()
    ref = -torch.rand(batch.num_tokens, generator=torch.Generator().manual_seed(1))
    desirable = torch.arange(len(batch)) % 3 > 0
    batch = batch.with_tokens(ref_log_probs=ref).with_rows(
        desirable=desirable, reference_point=torch.full((len(batch),), 0.7)
    )
    wanted, wanted_loss = plain_gradients(model, batch, point=0.7, beta=0.3, weights=(2.0, 0.5))
    algorithm = KTO(KTO.Config(beta=0.3, desirable_weight=2.0, undesirable_weight=0.5))
    backend = LocalBackend(
        LocalConfig(),
        model=ModelConfig(path=model, max_tokens_per_device=max_tokens),
        optimizer=OptimizerConfig(),
        context=BackendContext(),
    )
    counts = count(batch["num_loss_tokens"])

    def loss(out, micro_batch):
        scalar = reduce_terms(algorithm.loss(out, micro_batch), micro_batch, counts)
        return scalar, {"loss": Mean(scalar.item())}

    metrics = backend.forward_backward(batch, loss, temperature=1.0)

    assert metrics["loss"].total == pytest.approx(wanted_loss, rel=1e-5)
    found = {name: parameter.grad for parameter, name in backend._names.items()}
    assert found.keys() == wanted.keys()
    whole, plain = (torch.cat([them[name].flatten() for name in wanted]) for them in (found, wanted))
    assert float((whole - plain).norm()) <= 1e-5 * float(plain.norm())


def plain_gradients(path, batch, *, point, beta, weights):
    """Return gradients by name, and value, of eq. 7, sample by sample; one without loss tokens does not count."""
    model, values = load_model(path), []
    columns = (batch[name].split(batch.lengths.tolist()) for name in ("input_ids", "loss_mask", "ref_log_probs"))
    for ids, mask, ref, desirable in zip(*columns, batch["desirable"].tolist(), strict=True):
        if not mask.any():
            continue
        log_probs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        ratio = ((log_probs - ref[1:]) * mask[1:]).sum()
        weight = weights[0] if desirable else weights[1]
        value = weight * torch.sigmoid(beta * (ratio - point) if desirable else beta * (point - ratio))
        values.append(weight - value)
    loss = torch.stack(values).mean()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, float(loss.detach())


def prompts(lengths=(2, 3, 1)):
    count = len(lengths)
    rows = {"prompt_id": [8, 5, 3][:count], "group_id": [0, 1, 2][:count], "seed": [1, 2, 3][:count]}
    return Batch.of(
        lengths=lengths,
        tokens={"input_ids": torch.arange(50, 50 + sum(lengths))},
        rows=rows | {"label": [True, False, True][:count], "response": ["a", "b", "c"][:count]},
    )


def test_the_reference_point_is_estimated_from_each_response_with_the_prompt_of_the_row_before():
    algorithm = KTO(KTO.Config())
    roles = FakeRoles([role.name for role in algorithm.roles()])
    asked, plain = [], roles.actor.log_probs
    roles.actor.log_probs = lambda batch: asked.append(batch.local()) or plain(batch)

    experience = algorithm.collect(roles, prompts()).local()

    (pairs,) = asked
    found = {}
    for number, ids, mask in zip(
        pairs["group_id"].tolist(),
        pairs["input_ids"].split(pairs.lengths.tolist()),
        pairs["loss_mask"].split(pairs.lengths.tolist()),
        strict=True,
    ):
        found[number] = (ids[~mask].tolist(), ids[mask].tolist())
    assert {number: asked for number, (asked, _) in found.items()} == {0: [55], 1: [50, 51], 2: [52, 53, 54]}
    # the fakes' log-probs differ by (token id % 3) / 4
    ratios = [sum(token % 3 / 4 for token in answer) for _, answer in found.values()]
    point = sum(ratios) / 3
    assert point > 0
    assert experience["reference_point"].tolist() == pytest.approx([point] * 3)
    assert experience["desirable"].tolist() == [True, False, True]
    assert roles.metrics["kto/desirable"] == Mean(2.0, 3.0)


def test_the_reference_point_is_at_least_0():
    algorithm = KTO(KTO.Config())
    roles = FakeRoles([role.name for role in algorithm.roles()])
    likelier = roles.reference.log_probs

    def raised(batch):
        found = likelier(batch).local()
        return found.with_tokens(ref_log_probs=found["ref_log_probs"] + 3.0)

    roles.reference.log_probs = raised

    assert algorithm.collect(roles, prompts()).fetch("reference_point").tolist() == [0.0] * 3


def test_a_step_of_one_prompt_has_no_mismatched_pair():
    algorithm = KTO(KTO.Config())
    roles = FakeRoles([role.name for role in algorithm.roles()])

    with pytest.raises(ConfigError, match=r"trainer\.prompts_per_step=32"):
        algorithm.collect(roles, prompts((2,)))
