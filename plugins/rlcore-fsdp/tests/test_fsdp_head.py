"""Log-probs and entropy in chunks: same values and gradients as the direct computation, without the logits of all tokens."""

import pytest
import torch
from rlcore_fsdp.head import LogitRule, token_statistics

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
            log_probs, entropy = token_statistics(*tensors, targets, temperature=0.7, rule=rule, chunk=chunk)
        weights = torch.arange(1.0, len(targets) + 1)
        ((log_probs * weights).sum() + (entropy * weights.flip(0)).sum()).backward()
        results += [log_probs, entropy, *(tensor.grad for tensor in tensors if tensor is not None)]

    for mine, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), plain.double(), atol=1e-4, rtol=1e-4)


def test_entropy_of_an_impossible_token_is_finite():
    hidden, weight = torch.ones(1, 1), torch.tensor([[0.0], [0.0], [-float("inf")]])

    log_probs, entropy = token_statistics(
        hidden, weight, None, torch.tensor([1]), temperature=1.0, rule=LogitRule(1.0, None)
    )

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
        log_probs, entropy = token_statistics(
            hidden, weight, None, targets, temperature=1.0, rule=RULES["plain"], chunk=32
        )
        (log_probs.sum() + entropy.sum()).backward()

    assert largest <= 32 * vocab_size
    assert num_tokens * vocab_size > 10 * largest
