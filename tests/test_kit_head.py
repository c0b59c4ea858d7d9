"""Log-probs and entropy in chunks, also of a split vocabulary: same values and gradients as the direct computation."""

import pytest
import torch

from rlcore.kits.backend.head import Part, token_statistics
from rlcore.models.head import LogitRule
from rlcore.testing import run_ranks

TOKENS, WIDTH, VOCABULARY = 7, 6, 13
RULES = {"plain": LogitRule(1.0, None), "scaled": LogitRule(0.25, None), "capped": LogitRule(2.0, 3.0)}


def example(num_tokens=11, width=6, vocab_size=13, *, bias=False):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    tensors = [draw(num_tokens, width).float(), draw(vocab_size, width).float()]
    tensors.append(draw(vocab_size).float() if bias else None)
    targets = torch.randint(0, vocab_size, (num_tokens,), generator=generator)
    return [tensor if tensor is None else tensor.requires_grad_() for tensor in tensors], targets


def plainly(hidden, weight, bias, targets, temperature, rule):
    logits = hidden.double() @ weight.double().t() + (0.0 if bias is None else bias.double())
    logits = logits * rule.scale
    logits = logits if rule.softcap is None else rule.softcap * torch.tanh(logits / rule.softcap)
    log_p = (logits / temperature).log_softmax(-1)
    return log_p.gather(-1, targets[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_values_and_gradients_equal_the_direct_computation(rule, bias, chunk):
    found, expected = [], []
    for results, function in ((found, token_statistics), (expected, plainly)):
        tensors, targets = example(bias=bias)
        if function is plainly:
            log_probs, entropy = plainly(*tensors, targets, 0.7, rule)
        else:
            hidden, weight, added = tensors
            log_probs, entropy = token_statistics(
                hidden, weight, targets, temperature=0.7, bias=added, rule=rule, chunk=chunk
            )
        weights = torch.arange(1.0, len(targets) + 1)
        ((log_probs * weights).sum() + (entropy * weights.flip(0)).sum()).backward()
        results += [log_probs, entropy, *(tensor.grad for tensor in tensors if tensor is not None)]

    for mine, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), plain.double(), atol=1e-4, rtol=1e-4)


def test_entropy_of_an_impossible_token_is_finite():
    hidden, weight = torch.ones(1, 1), torch.tensor([[0.0], [0.0], [-float("inf")]])

    log_probs, entropy = token_statistics(hidden, weight, torch.tensor([1]), temperature=1.0)

    # two equally likely tokens: log 1/2 and ln 2 nats
    assert log_probs.tolist() == pytest.approx([-0.693147], abs=1e-6)
    assert entropy.tolist() == pytest.approx([0.693147], abs=1e-6)


def test_no_tensor_as_large_as_all_logits_is_allocated():
    num_tokens, vocab_size = 512, 4096
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else (out,):
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return out

    (hidden, weight, _), targets = example(num_tokens, 8, vocab_size)
    with Watch():
        log_probs, entropy = token_statistics(hidden, weight, targets, temperature=1.0, chunk=32)
        (log_probs.sum() + entropy.sum()).backward()

    assert largest <= 32 * vocab_size
    assert num_tokens * vocab_size > 10 * largest


def split_example():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator)
    targets = torch.tensor([0, 12, 5, 6, 7, 3, 12])
    return hidden, weight, targets


def statistics(rank, world, directory, padded, chunk):
    """Return log-probs, entropy, the gradient of hidden states and that of this part of the weight."""
    hidden, weight, targets = split_example()
    rows = padded // world
    weight = torch.nn.functional.pad(weight, (0, 0, 0, padded - VOCABULARY))[rank * rows : (rank + 1) * rows]
    hidden, weight = hidden.requires_grad_(), weight.clone().requires_grad_()
    part = Part(torch.distributed.group.WORLD, VOCABULARY)
    found = token_statistics(hidden, weight, targets, temperature=0.7, part=part, chunk=chunk)
    scale = torch.arange(1.0, TOKENS + 1)
    ((found[0] * scale).sum() + (found[1] * scale.flip(0)).sum()).backward()
    return [tensor.tolist() for tensor in (*(t.detach() for t in found), hidden.grad, weight.grad)]


# two parts of 8 rows with 3 rows of padding; four parts of 8, of which the last two are almost or entirely padding
@pytest.mark.parametrize(("world", "padded", "chunk"), [(2, 16, 0), (2, 14, 3), (4, 32, 2)])
def test_a_split_vocabulary_gives_the_same_values_and_gradients(world, padded, chunk, tmp_path):
    hidden, weight, targets = (tensor.double() if tensor.is_floating_point() else tensor for tensor in split_example())
    hidden.requires_grad_()
    weight.requires_grad_()
    log_p = (hidden @ weight.t() / 0.7).log_softmax(-1)
    log_probs, entropy = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    scale = torch.arange(1.0, TOKENS + 1)
    ((log_probs * scale).sum() + (entropy * scale.flip(0)).sum()).backward()

    reports = run_ranks(world, statistics, tmp_path, padded, chunk)

    for report in reports:
        for found, expected in zip(report, (log_probs, entropy, hidden.grad)):
            torch.testing.assert_close(torch.tensor(found).double(), expected.detach(), atol=1e-4, rtol=1e-4)
    of_weight = torch.cat([torch.tensor(report[3]) for report in reports])
    torch.testing.assert_close(of_weight[:VOCABULARY].double(), weight.grad, atol=1e-4, rtol=1e-4)
    assert not of_weight[VOCABULARY:].any(), "padding gets no gradient"
