"""The `local` backend equals plain transformers, for any split of the work and after saving and loading."""

import json
import math
import multiprocessing
import shutil
import time
from datetime import timedelta

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlcore.errors import ConfigError, ModelError
from rlcore.kits.backend.optimizer import lr_at
from rlcore.models.load import check_directory, load_model, load_tokenizer
from rlcore.protocols.backend import BackendContext, OptimizerConfig
from rlcore.testing.waiting import HANG_S
from rlcore.types import LossTerms, Mean
from rlcore.workers.averaging import count, reduce_terms
from tests.models import (
    FAMILIES,
    TRAINED,
    log_probs_of,
    make_backend,
    make_batch,
    random_ids,
    save_model,
    trained_model,
)

LENGTHS = [9, 4, 12, 2, 7, 5, 11, 3]
"""Lengths of the samples in tokens; the fourth has only a prompt, so its row has no loss tokens."""


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Directories of random models by family, and of trained models by name."""
    root = tmp_path_factory.mktemp("models")
    made = {family: save_model(family, root / family) for family in FAMILIES}
    return made | {name: trained_model(name) for name in TRAINED}


@pytest.fixture
def path(paths):
    return paths["qwen2"]


def policy_loss(batch, average="token-mean"):
    """Return a loss over the whole mini-batch, as in workers; its terms depend on the token ids."""
    counts = count(batch["num_loss_tokens"])

    def loss(out, micro_batch):
        of_token = (micro_batch["input_ids"] % 7).float() - 3.0
        outputs = out.log_probs * of_token + 0.1 * out.entropy if out.values is None else (out.values - of_token) ** 2
        scalar = reduce_terms(LossTerms(terms=outputs, average=average), micro_batch, counts)
        return scalar, {"loss": Mean(float(scalar.detach()), 0.0), "micro_batches": Mean(1.0, 0.0)}

    return loss


def gradients(backend):
    return {name: parameter.grad.clone() for parameter, name in backend._names.items()}


def assert_close(found, expected, tolerance=1e-5):
    """Check that tensors are equal relative to their norms."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert float((found[name] - tensor).norm()) <= tolerance * float(tensor.norm()) + 1e-9, name


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", [*FAMILIES, *TRAINED])
def test_log_probs_equal_those_of_plain_transformers(name, temperature, paths):
    samples = random_ids(LENGTHS)
    own = load_model(paths[name], attention="eager")
    expected = torch.cat([log_probs_of(own, ids, temperature) for ids in samples])
    batch = make_batch(samples)

    out = make_backend(paths[name], max_tokens_per_device=16).forward(batch, temperature=temperature)

    mask = batch["loss_mask"]
    torch.testing.assert_close(out.log_probs[mask].double(), expected[mask], atol=3e-5, rtol=1e-5)
    assert out.log_probs[~mask].tolist() == [0.0] * int((~mask).sum())
    assert out.entropy[~mask].tolist() == [0.0] * int((~mask).sum())
    assert out.log_probs.dtype == torch.float32
    assert out.values is None


def test_first_token_of_a_sample_has_nothing_before_it_and_stays_zero(path):
    samples = random_ids([4, 3])
    batch = make_batch(samples, prompt_lengths=[0, 0])

    out = make_backend(path).forward(batch, temperature=1.0)

    assert (out.log_probs == 0).tolist() == [True, False, False, False, True, False, False]


@pytest.mark.parametrize("average", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_gradients_do_not_depend_on_micro_batches_or_the_order_of_samples(average, path):
    samples = random_ids(LENGTHS)
    found = {}
    for max_tokens in (16384, 24, 12, 1):
        for step in (1, -1):
            batch = make_batch(samples[::step])
            backend = make_backend(path, max_tokens_per_device=max_tokens)
            metrics = backend.forward_backward(batch, policy_loss(batch, average), temperature=0.9)
            found[max_tokens, step] = metrics["loss"].total, gradients(backend), metrics["micro_batches"].total

    loss, expected, _ = found[16384, 1]
    for other_loss, other, _ in found.values():
        assert other_loss == pytest.approx(loss, rel=1e-5)
        assert_close(other, expected)
    # 53 tokens: all in one; 12 + 11 | 9 + 7 + 5 + 3 | 4 + 2; one bin per long row at 12; every row alone
    assert [found[tokens, 1][2] for tokens in (16384, 24, 1)] == [1.0, 3.0, 8.0]


def group_loss(batch):
    """Return a loss of groups: minus the log-probability that the first of a group is preferred to all others."""
    counts = count(batch["num_loss_tokens"], batch.unit_sizes())

    def loss(out, micro_batch):
        x = micro_batch.per_row(out.log_probs) / 10
        first = torch.from_numpy(micro_batch.unit_sizes().cumsum() - micro_batch.unit_sizes())
        terms = micro_batch.per_unit(x.exp()).log() - x[first]
        scalar = reduce_terms(LossTerms(terms=terms, average="unit-mean"), micro_batch, counts)
        return scalar, {"loss": Mean(float(scalar.detach()), 0.0), "micro_batches": Mean(1.0, 0.0)}

    return loss


def test_gradients_of_a_loss_over_groups_do_not_depend_on_micro_batches(path):
    batch = make_batch(random_ids(LENGTHS)).with_rows(unit_id=torch.tensor([6, 6, 6, 0, 4, 4, 9, 9]))
    found = {}
    for max_tokens in (16384, 40, 26, 1):
        backend = make_backend(path, max_tokens_per_device=max_tokens)
        metrics = backend.forward_backward(batch, group_loss(batch), temperature=1.0)
        found[max_tokens] = metrics["loss"].total, gradients(backend), metrics["micro_batches"].total

    loss, expected, _ = found[16384]
    for other_loss, other, _ in found.values():
        assert other_loss == pytest.approx(loss, rel=1e-5)
        assert_close(other, expected)
    # groups of 25, 2, 12 and 14 tokens: all; 25 + 14 | 12 + 2; 25 | 14 + 12 | 2; every group alone
    assert [number for *_, number in found.values()] == [1.0, 2.0, 3.0, 4.0]


def test_gradient_equals_that_of_a_loop_in_plain_transformers(path):
    samples = random_ids(LENGTHS)
    batch = make_batch(samples)
    backend = make_backend(path, max_tokens_per_device=24)
    own = load_model(path, attention="eager")

    backend.forward_backward(batch, policy_loss(batch), temperature=0.8)

    total = torch.zeros(())
    for ids in samples:
        log_probs = (own(torch.tensor([ids])).logits[0, :-1] / 0.8).log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        targets = torch.tensor(ids[1:])
        terms = log_probs.gather(-1, targets[:, None]).squeeze(-1) * (targets % 7 - 3) + 0.1 * entropy
        total = total + terms[1:].sum() / int(batch["num_loss_tokens"].sum())  # the second token is prompt
    total.backward()
    assert_close(gradients(backend), {name: p.grad for name, p in own.named_parameters()}, 2e-5)


def test_gradients_of_two_calls_add_up(path):
    samples = random_ids(LENGTHS)
    batch = make_batch(samples)
    whole, halves = make_backend(path), make_backend(path)

    whole.forward_backward(batch, policy_loss(batch), temperature=1.0)
    for half in batch.split([3, 5]):
        halves.forward_backward(half, policy_loss(batch), temperature=1.0)

    assert_close(gradients(halves), gradients(whole))


def test_gradient_checkpointing_gives_the_same_gradients(paths):
    batch = make_batch(random_ids(LENGTHS))
    found = []
    for on in (False, True):
        backend = make_backend(paths["gemma2"], gradient_checkpointing=on)
        backend.forward_backward(batch, policy_loss(batch), temperature=1.0)
        found.append(gradients(backend))

    assert_close(found[1], found[0], 1e-6)


def test_bfloat16_is_near_float32_while_parameters_stay_float32(path):
    batch = make_batch(random_ids(LENGTHS))
    exact, rough = make_backend(path), make_backend(path, precision="bfloat16")

    difference = (
        exact.forward(batch, temperature=1.0).log_probs - rough.forward(batch, temperature=1.0).log_probs
    ).abs()
    for backend in (exact, rough):
        backend.forward_backward(batch, policy_loss(batch), temperature=1.0)
    angle = torch.nn.functional.cosine_similarity(
        *(torch.cat([g.reshape(-1) for g in gradients(backend).values()]) for backend in (exact, rough)), dim=0
    )
    metrics = rough.step()

    assert 1e-4 < float(difference.max()) < 0.5
    assert float(angle) > 0.98
    assert metrics["skipped"].value == 0.0
    assert {parameter.dtype for parameter in rough._names} == {torch.float32}


@pytest.mark.parametrize("lengths", [[], [0, 0], [2, 1]], ids=["no rows", "empty rows", "only prompts"])
def test_batch_without_loss_tokens_gives_zeros_and_no_gradient(lengths, path):
    backend = make_backend(path)
    batch = make_batch(random_ids(lengths))

    out = backend.forward(batch, temperature=1.0)
    metrics = backend.forward_backward(batch, policy_loss(batch), temperature=1.0)

    assert out.log_probs.tolist() == [0.0] * sum(lengths)
    assert metrics.get("loss", Mean(0.0)).total == 0.0
    assert all(parameter.grad is None for parameter in backend._names)


def test_rows_come_back_in_batch_order_whatever_the_micro_batches(path):
    samples = random_ids(LENGTHS)
    backend = make_backend(path, max_tokens_per_device=12)
    whole = backend.forward(make_batch(samples), temperature=1.0).log_probs
    parts = [backend.forward(make_batch([ids]), temperature=1.0).log_probs for ids in samples]

    torch.testing.assert_close(whole, torch.cat(parts), atol=1e-5, rtol=1e-5)


def test_value_head_reads_the_state_in_which_each_token_was_chosen(paths):
    samples = random_ids([6, 4])
    backend = make_backend(paths["llama"], context=BackendContext(head="value", seed=3))
    own = load_model(paths["llama"], attention="eager")
    weight = backend._value_head.weight.detach()

    out = backend.forward(make_batch(samples), temperature=1.0)

    expected = []
    for ids in samples:
        with torch.no_grad():
            states = own.model(torch.tensor([ids])).last_hidden_state[0]
        values = (states @ weight.T).squeeze(-1)
        expected += [0.0, 0.0, *values[1:-1].tolist()]  # token 2 is chosen in the state after token 1
    assert out.log_probs is None
    assert out.values.tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("family", "embedding_is_trained"), [("llama", True), ("qwen2", False)], ids=["tied", "untied"]
)
def test_critic_trains_its_head_and_leaves_out_the_embedding_that_no_value_needs(family, embedding_is_trained, paths):
    backend = make_backend(paths[family], context=BackendContext(head="value"), max_tokens_per_device=12)
    batch = make_batch(random_ids(LENGTHS))
    before = backend._value_head.weight.detach().clone()

    metrics = backend.forward_backward(batch, policy_loss(batch), temperature=1.0)
    found = gradients(backend)
    backend.step()

    assert metrics["loss"].total > 0
    assert "lm_head.weight" not in found
    assert "value_head.weight" in found
    assert all(float(gradient.norm()) > 0 for gradient in found.values())
    assert ("model.embed_tokens.weight" in found) and embedding_is_trained == backend._model.config.tie_word_embeddings
    assert not torch.equal(backend._value_head.weight, before)


def test_seed_decides_the_value_head_and_nothing_else(path):
    heads = [make_backend(path, context=BackendContext(head="value", seed=s))._value_head.weight for s in (1, 1, 2)]

    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])
    assert 0.0 < float(heads[0].detach().abs().max()) < 5 / 33


def test_critic_is_the_same_after_save_and_load(path, tmp_path):
    batch = make_batch(random_ids(LENGTHS))
    first = make_backend(path, context=BackendContext(head="value", seed=1))
    train(first, batch)
    first.save(tmp_path)
    second = make_backend(path, context=BackendContext(head="value", seed=2))
    second.load(tmp_path)

    assert torch.equal(first._value_head.weight, second._value_head.weight)
    assert train(first, batch) == train(second, batch)
    assert_same_bits(first, second)
    assert "value_head.weight" not in dict(first.weights())


def train(backend, batch, temperature=1.0):
    """Run one training step; return loss, norm and learning rate as plain numbers."""
    metrics = backend.forward_backward(batch, policy_loss(batch), temperature=temperature)
    return {"loss": metrics["loss"].total} | {name: mean.value for name, mean in backend.step().items()}


def assert_same_bits(one, other):
    for (name, a), (_, b) in zip(one.weights(), other.weights(), strict=True):
        assert torch.equal(a, b), name


SHARES = {
    "even": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "uneven": [[6], [5, 0, 3, 1, 7, 2, 4]],
    "empty": [[], [0, 1, 2, 3, 4, 5, 6, 7]],
    "four": [[0, 1], [2], [3, 4, 5, 6, 7], []],
}
"""Rows of each rank; in "four", the last rank has none."""
NUM_STEPS = 3
SGD = {"name": "sgd", "momentum": 0.9}
ADAMW = OptimizerConfig(lr=1e-3, eps=1e-3, schedule="linear", warmup_steps=1, weight_decay=0.1, clip_grad_norm=0.5)
"""Optimizer whose eps is not smaller than the rounding errors of gradients, which AdamW would amplify otherwise."""


def share_of_training(path, shares, rank, head):
    """Train some steps on the rows of one rank; the last gradient is NaN on rank 0."""
    batch = make_batch(random_ids(LENGTHS))
    context = BackendContext(rank=rank, world_size=len(shares), head=head, total_steps=NUM_STEPS, seed=4)
    backend = make_backend(path, optimizer=ADAMW, context=context, max_tokens_per_device=14)
    history = []
    for _ in range(NUM_STEPS):
        metrics = backend.forward_backward(batch.take(shares[rank]), policy_loss(batch), temperature=1.0)
        stepped = backend.step()
        history.append([metrics.get("loss", Mean(0.0)).total, stepped["grad_norm"].value, stepped["lr"].value])
    if rank == 0:
        backend.forward_backward(batch, lambda out, part: (next_output(out).sum() * float("nan"), {}), temperature=1.0)
    skipped = backend.step()["skipped"].value
    weights = {name: parameter.detach().clone() for parameter, name in backend._names.items()}
    return {"history": history, "skipped": skipped}, weights


def next_output(out):
    return out.log_probs if out.values is None else out.values


def run_rank(rank, path, directory):
    """Run every case in its own process group; called in four processes."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    for case, shares in SHARES.items():
        for head in ("token", "value"):
            if rank >= len(shares) or (head == "value" and case != "four"):
                continue
            name = f"{case}-{head}"
            dist.init_process_group(
                "gloo",
                init_method=f"file://{directory}/rendezvous-{name}",
                rank=rank,
                world_size=len(shares),
                timeout=timedelta(seconds=HANG_S),
            )
            report, weights = share_of_training(path, shares, rank, head)
            dist.destroy_process_group()
            (directory / f"{name}-{rank}.json").write_text(json.dumps(report))
            save_file(weights, directory / f"{name}-{rank}.safetensors")
    if rank < 2:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{directory}/rendezvous-other",
            rank=rank,
            world_size=2,
            timeout=timedelta(seconds=HANG_S),
        )
        other = path if rank == 0 else str(directory / "other")
        with pytest.raises(ModelError, match=r"the ranks have read different weights from .*\nCopy the same model"):
            make_backend(other, context=BackendContext(rank=rank, world_size=2))
        dist.destroy_process_group()
        (directory / f"other-{rank}.json").write_text("{}")


def run_ranks(path, directory):
    """Fork four processes from one that has imported everything and started no thread: one import instead of four."""
    import transformers

    assert transformers.Qwen2ForCausalLM  # found lazily: here, so that the children need not
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=run_rank, args=(rank, path, directory), daemon=True) for rank in range(4)]
    deadline = time.monotonic() + HANG_S
    for process in processes:
        process.start()
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    assert [process.exitcode for process in processes] == [0] * 4


@pytest.fixture(scope="module")
def ranks(paths, tmp_path_factory):
    """Return a directory with the reports of four processes on every case."""
    directory = tmp_path_factory.mktemp("ranks")
    save_model("qwen2", directory / "other", seed=1)
    launcher = multiprocessing.get_context("spawn").Process(target=run_ranks, args=(paths["qwen2"], directory))
    launcher.start()
    launcher.join(HANG_S)
    launcher.kill()
    assert launcher.exitcode == 0
    return directory


@pytest.mark.parametrize("name", ["even-token", "uneven-token", "empty-token", "four-token", "four-value"])
def test_data_parallel_training_equals_one_process(name, ranks, path):
    case, head = name.split("-")
    everything = [list(range(len(LENGTHS)))]
    expected, expected_weights = share_of_training(path, everything, 0, head)
    reports = [json.loads((ranks / f"{name}-{rank}.json").read_text()) for rank in range(len(SHARES[case]))]
    weights = [load_file(ranks / f"{name}-{rank}.safetensors") for rank in range(len(SHARES[case]))]

    losses = [[step[0] for step in report["history"]] for report in reports]
    assert [sum(parts) for parts in zip(*losses)] == pytest.approx([s[0] for s in expected["history"]], rel=1e-5)
    for report, of_rank in zip(reports, weights):
        for found, step in zip(report["history"], expected["history"]):
            assert found[1:] == pytest.approx(step[1:], rel=1e-5)
        assert report["skipped"] == expected["skipped"] == 1.0
        assert all(torch.equal(of_rank[key], weights[0][key]) for key in of_rank)
    assert_close(weights[0], expected_weights)
    before = load_file(f"{path}/model.safetensors")
    moved = [float((weights[0][key] - before[key]).norm() / before[key].norm()) for key in before if key in weights[0]]
    assert min(moved) > 1e-4


def test_ranks_that_read_different_weights_refuse_to_train(ranks):
    assert [(ranks / f"other-{rank}.json").exists() for rank in range(2)] == [True, True]


def test_step_clips_by_the_norm_of_all_gradients_and_moves_by_adamw(path):
    config = OptimizerConfig(lr=0.01, betas=(0.8, 0.9), eps=0.1, weight_decay=0.5, clip_grad_norm=0.25)
    backend = make_backend(path, optimizer=config)
    batch = make_batch(random_ids(LENGTHS))
    before = {name: tensor.clone() for name, tensor in backend.weights()}
    backend.forward_backward(batch, policy_loss(batch), temperature=1.0)
    gradient = gradients(backend)
    norm = math.sqrt(sum(float(g.double().pow(2).sum()) for g in gradient.values()))

    metrics = backend.step()

    assert norm > 0.25
    assert metrics["grad_norm"].value == pytest.approx(norm, rel=1e-5)
    for name, after in backend.weights():
        # first step of AdamW: both moments, once corrected for their start at zero, are g and g squared
        g = gradient[name] * 0.25 / norm
        expected = before[name] * (1 - 0.01 * 0.5) - 0.01 * g / (g.abs() + 0.1)
        torch.testing.assert_close(after, expected, atol=1e-6, rtol=1e-5)
    assert all(parameter.grad is None for parameter in backend._names)


def test_sgd_moves_by_the_gradient_and_its_momentum(path):
    config = OptimizerConfig(name="sgd", lr=0.5, momentum=0.9, weight_decay=0.1, clip_grad_norm=0.0)
    backend = make_backend(path, optimizer=config)
    batch = make_batch(random_ids(LENGTHS))
    velocity = {name: torch.zeros_like(tensor) for name, tensor in backend.weights()}
    for _ in range(2):
        before = {name: tensor.clone() for name, tensor in backend.weights()}
        backend.forward_backward(batch, policy_loss(batch), temperature=1.0)
        gradient = {name: tensor.clone() for name, tensor in gradients(backend).items()}
        backend.step()
        for name, after in backend.weights():
            velocity[name] = 0.9 * velocity[name] + gradient[name] + 0.1 * before[name]
            torch.testing.assert_close(after, before[name] - 0.5 * velocity[name], atol=1e-6, rtol=1e-5)


def test_clip_grad_norm_0_turns_clipping_off(path):
    batch = make_batch(random_ids(LENGTHS))
    moved = []
    for clip in (0.0, 1e9, 0.01):
        backend = make_backend(path, optimizer=OptimizerConfig(lr=0.01, eps=1.0, clip_grad_norm=clip))
        train(backend, batch)
        moved.append(dict(backend.weights()))

    assert all(torch.equal(moved[0][name], moved[1][name]) for name in moved[0])
    assert not torch.equal(moved[0]["lm_head.weight"], moved[2]["lm_head.weight"])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_gradient_that_is_not_finite_changes_nothing_and_is_counted(bad, path):
    config = OptimizerConfig(lr=1e-3, schedule="linear")
    clean, hit = (make_backend(path, optimizer=config, context=BackendContext(total_steps=4)) for _ in range(2))
    batch = make_batch(random_ids(LENGTHS))
    train(clean, batch)
    train(hit, batch)

    hit.forward_backward(batch, lambda out, part: (out.log_probs.sum() * bad, {}), temperature=1.0)
    skipped = hit.step()

    assert skipped["skipped"] == Mean(1.0)
    assert "grad_norm" not in skipped
    assert_same_bits(clean, hit)
    assert train(hit, batch) == train(clean, batch)  # moments and learning rate were left alone too
    assert_same_bits(clean, hit)


def test_step_reports_the_learning_rate_it_used(path):
    config = OptimizerConfig(lr=1.0, schedule="linear", warmup_steps=2, min_lr_ratio=0.0)
    backend = make_backend(path, optimizer=config, context=BackendContext(total_steps=4))
    batch = make_batch(random_ids([4]))

    rates = [train(backend, batch)["lr"] for _ in range(5)]

    assert rates == [0.5, 1.0, 1.0, 0.5, 0.0]


TOTAL = 6
WARM = {"lr": 2.0, "warmup_steps": 2, "min_lr_ratio": 0.25}


@pytest.mark.parametrize(
    ("config", "total_steps", "expected"),
    [
        (OptimizerConfig(lr=2.0), TOTAL, [2.0] * 8),
        (OptimizerConfig(schedule="constant", **WARM), TOTAL, [1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]),
        # four steps after the warm-up; shares 1, 3/4, 1/2, 1/4, 0 of the 1.5 above the floor of 0.5
        (OptimizerConfig(schedule="linear", **WARM), TOTAL, [1.0, 2.0, 2.0, 1.625, 1.25, 0.875, 0.5, 0.5]),
        # (1 + cos(pi x)) / 2 at x = 0, 1/4, 1/2, 3/4, 1: 1, 0.853553, 0.5, 0.146447, 0
        (OptimizerConfig(schedule="cosine", **WARM), TOTAL, [1.0, 2.0, 2.0, 1.780330, 1.25, 0.719670, 0.5, 0.5]),
        (OptimizerConfig(lr=2.0, schedule="linear", min_lr_ratio=0.0), 2, [2.0, 1.0, 0.0]),
        (OptimizerConfig(lr=2.0, schedule="cosine"), 0, [2.0, 2.0]),
        (OptimizerConfig(lr=2.0, schedule="linear", warmup_steps=4), 4, [0.5, 1.0, 1.5, 2.0, 2.0]),
        (OptimizerConfig(lr=2.0, warmup_ratio=0.3), 10, [2 / 3, 4 / 3, 2.0, 2.0]),
        (OptimizerConfig(lr=2.0, warmup_ratio=0.31), 10, [0.5, 1.0, 1.5, 2.0, 2.0]),
        (OptimizerConfig(lr=2.0, warmup_ratio=0.5), 0, [2.0, 2.0]),
    ],
    ids=[
        "constant",
        "warm-up",
        "linear",
        "cosine",
        "linear to zero",
        "unknown end",
        "warm-up only",
        "ratio",
        "ratio rounded up",
        "ratio of an unknown end",
    ],
)
def test_learning_rate_of_each_step(config, total_steps, expected):
    assert [lr_at(config, step, total_steps) for step in range(len(expected))] == pytest.approx(expected, abs=1e-6)


def test_frozen_model_scores_but_has_no_optimizer_and_no_gradients(path, tmp_path):
    backend = make_backend(path, context=BackendContext(trained=False))
    batch = make_batch(random_ids(LENGTHS))

    out = backend.forward(batch, temperature=1.0)

    assert float(out.log_probs.sum()) < 0
    assert not any(parameter.requires_grad for parameter in backend._model.parameters())
    with pytest.raises(AssertionError, match="frozen"):
        backend.forward_backward(batch, policy_loss(batch), temperature=1.0)
    with pytest.raises(AssertionError, match="frozen"):
        backend.step()
    backend.save(tmp_path)
    assert not (tmp_path / "optimizer.moments").exists()


@pytest.mark.parametrize("name", [*FAMILIES, *TRAINED])
def test_weights_have_the_names_and_values_of_the_users_files(name, paths):
    backend = make_backend(paths[name])
    files = load_file(f"{paths[name]}/model.safetensors")

    weights = dict(backend.weights())

    assert weights.keys() == files.keys()
    assert all(torch.equal(weights[key], files[key]) for key in files)
    assert not any(tensor.requires_grad for tensor in weights.values())


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", *TRAINED])
def test_transformers_opens_a_saved_model_and_computes_the_same(name, paths, tmp_path):
    import transformers

    samples = random_ids(LENGTHS)
    batch = make_batch(samples)
    backend = make_backend(paths[name])
    train(backend, batch)

    backend.save(tmp_path)

    attention = "eager" if name == "gemma2" else "sdpa"  # sdpa leaves out gemma2's soft cap in some versions
    own = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=attention).eval()
    expected = torch.cat([log_probs_of(own, ids) for ids in samples])[batch["loss_mask"]]
    found = backend.forward(batch, temperature=1.0).log_probs[batch["loss_mask"]]
    torch.testing.assert_close(found.double(), expected, atol=3e-5, rtol=1e-5)


@pytest.mark.parametrize("names", [("sgd", "adamw"), ("adamw", "sgd")])
def test_the_state_of_another_optimizer_is_refused_before_anything_changes(names, path, tmp_path):
    settings = {"sgd": OptimizerConfig(name="sgd", momentum=0.9, lr=0.1), "adamw": OptimizerConfig(lr=0.1)}
    first, second = (make_backend(path, optimizer=settings[name]) for name in names)
    before = [weight.clone() for _, weight in second.weights()]
    train(first, make_batch(random_ids(LENGTHS)))
    first.save(tmp_path)

    with pytest.raises(
        ConfigError, match=f"the checkpoint has the state of {names[0]}\nType  optimizer.name={names[0]}"
    ):
        second.load(tmp_path)
    assert all(torch.equal(old, new) for old, (_, new) in zip(before, second.weights(), strict=True))


@pytest.mark.parametrize(
    ("steps_before", "name", "optimizer"),
    [(0, "qwen2", {}), (2, "qwen2", {}), (2, "gemma2", {}), (2, "qwen2", SGD), (0, "qwen2", {"name": "sgd"})],
    ids=["before the first step", "after two steps", "a family without sdpa", "sgd", "sgd without state"],
)
def test_training_continues_bit_for_bit_after_save_and_load(steps_before, name, optimizer, paths, tmp_path):
    path = paths[name]
    config = OptimizerConfig(lr=1e-3, schedule="cosine", warmup_steps=1, weight_decay=0.1, **optimizer)
    context = BackendContext(total_steps=5)
    batch = make_batch(random_ids(LENGTHS))
    first = make_backend(path, optimizer=config, context=context)
    for _ in range(steps_before):
        train(first, batch)
    first.save(tmp_path)
    second = make_backend(path, optimizer=config, context=context)
    train(second, batch)  # what it knew before must be forgotten
    second.load(tmp_path)

    for _ in range(2):
        assert train(second, batch) == train(first, batch)
    assert_same_bits(first, second)


@pytest.mark.parametrize(
    "missing", ["backend.json", "optimizer.moments", "model.safetensors", "config.json", "value_head.safetensors"]
)
def test_nothing_changes_when_a_file_of_the_checkpoint_is_missing(missing, path, tmp_path):
    context = BackendContext(head="value")
    batch = make_batch(random_ids(LENGTHS))
    saved = make_backend(path, context=context)
    train(saved, batch)
    saved.save(tmp_path)
    (tmp_path / missing).unlink()
    one, other = (make_backend(path, context=context) for _ in range(2))

    with pytest.raises(ModelError, match=missing.split(".")[0].replace("model", "safetensors|loaded")):
        one.load(tmp_path)

    assert train(one, batch) == train(other, batch)
    assert_same_bits(one, other)


def test_checkpoint_of_another_model_is_refused_by_the_name_of_a_parameter(paths, tmp_path):
    make_backend(paths["qwen2"]).save(tmp_path)
    backend = make_backend(paths["qwen3"])

    with pytest.raises(
        ModelError, match=r"checkpoint of another model: .* parameters differ, the first is .*\nType the"
    ):
        backend.load(tmp_path)


def broken(path, tmp_path, *, remove=(), write=None):
    copy = tmp_path / "model"
    shutil.copytree(path, copy)
    for name in remove:
        (copy / name).unlink()
    for name, content in (write or {}).items():
        (copy / name).write_bytes(content)
    return str(copy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"remove": ["config.json"]}, "has no config.json.*\nSee  ls "),
        ({"remove": ["model.safetensors"]}, r"has no \*.safetensors\nConvert it once:  AutoModel"),
        (
            {"remove": ["model.safetensors"], "write": {"pytorch_model.bin": b"never read"}},
            r"has no \*.safetensors; it has pytorch_model.bin, which rlcore does not unpickle\nConvert it once",
        ),
        ({"write": {"config.json": b'{"model_type": "nosuch"}'}}, "config.json cannot be used: .*nosuch"),
        ({"write": {"config.json": b"{"}}, "config.json cannot be used: "),
        ({"write": {"model.safetensors": b"garbage"}}, "cannot be loaded by AutoModelForCausalLM"),
    ],
    ids=["no config", "no weights", "pickled weights", "unknown family", "config is no JSON", "weights are no weights"],
)
def test_unusable_model_directory_is_refused_with_the_reason(change, message, path, tmp_path):
    with pytest.raises(ModelError, match=message) as caught:
        make_backend(broken(path, tmp_path, **change))

    first, _, second = str(caught.value).partition("\n")
    assert str(tmp_path / "model") in first
    assert second.strip()


def test_missing_path_suggests_a_similar_one(path, tmp_path):
    broken(path, tmp_path)

    with pytest.raises(ModelError, match=r"there is no such directory. Did you mean '.*/model'\?\nIt must be a local"):
        check_directory(str(tmp_path / "modle"))


def test_model_without_tokenizer_files_is_named(path):
    with pytest.raises(ModelError, match=r"has no tokenizer .*tokenizer.json.*\nCopy the tokenizer files"):
        load_tokenizer(path)


def test_weights_that_lack_a_parameter_are_refused(path, tmp_path):
    directory = broken(path, tmp_path)
    weights = load_file(f"{directory}/model.safetensors")
    weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, f"{directory}/model.safetensors", metadata={"format": "pt"})

    with pytest.raises(
        ModelError, match=r"lacks 1 weights of Qwen2ForCausalLM, the first is model.layers.1.mlp.up_proj"
    ):
        make_backend(directory)


def test_weights_of_another_shape_are_refused(path, tmp_path):
    directory = broken(path, tmp_path)
    weights = load_file(f"{directory}/model.safetensors")
    weights["model.norm.weight"] = torch.ones(7)
    save_file(weights, f"{directory}/model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ModelError, match=r"cannot be loaded by AutoModelForCausalLM: .*\nCopy the whole"):
        make_backend(directory)


def test_tokenizer_of_the_pretrained_model_is_loaded_once(assets):
    path = str(assets / "models" / "stories260k")

    assert load_tokenizer(path) is load_tokenizer(path)
    assert load_tokenizer(path).decode(load_tokenizer(path)("Once upon a time").input_ids, skip_special_tokens=True)


def test_backend_writes_plain_files_only(path, tmp_path):
    backend = make_backend(path, context=BackendContext(head="value"))
    train(backend, make_batch(random_ids(LENGTHS)))

    backend.save(tmp_path)

    assert {file.suffix for file in tmp_path.iterdir()} == {".json", ".safetensors", ".moments"}
    assert load_file(tmp_path / "optimizer.moments"), "safetensors under another ending"
    assert json.loads((tmp_path / "backend.json").read_text()) == {"num_steps": 1}


def test_positions_that_depend_on_the_longest_sample_are_refused(paths, tmp_path):
    shutil.copytree(paths["llama"], tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))

    with pytest.raises(ModelError, match=r"rope_type=dynamic: .* other samples\nSet a fixed rope_type"):
        make_backend(tmp_path / "model")
