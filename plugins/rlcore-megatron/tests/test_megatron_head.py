"""Log-probs and entropy over a split vocabulary: same values and gradients as the direct computation, also with padding."""

import pytest
import torch
from megatron_cases import PRELOAD
from rlcore_megatron.head import token_statistics

from rlcore.testing import run_ranks

TOKENS, WIDTH, VOCABULARY = 7, 6, 13


def example():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator)
    targets = torch.tensor([0, 12, 5, 6, 7, 3, 12])
    return hidden, weight, targets


def statistics(rank, world, directory, padded, chunk):
    """Return log-probs, entropy, the gradient of hidden states and that of this part of the weight."""
    hidden, weight, targets = example()
    rows = padded // world
    weight = torch.nn.functional.pad(weight, (0, 0, 0, padded - VOCABULARY))[rank * rows : (rank + 1) * rows]
    hidden, weight = hidden.requires_grad_(), weight.clone().requires_grad_()
    found = token_statistics(
        hidden,
        weight,
        targets,
        temperature=0.7,
        vocabulary=VOCABULARY,
        group=torch.distributed.group.WORLD,
        chunk=chunk,
    )
    scale = torch.arange(1.0, TOKENS + 1)
    ((found[0] * scale).sum() + (found[1] * scale.flip(0)).sum()).backward()
    return [tensor.tolist() for tensor in (*(t.detach() for t in found), hidden.grad, weight.grad)]


# two parts of 8 rows with 3 rows of padding; four parts of 8, of which the last two are almost or entirely padding
@pytest.mark.parametrize(("world", "padded", "chunk"), [(2, 16, 0), (2, 14, 3), (4, 32, 2)])
def test_values_and_gradients_equal_the_direct_computation(world, padded, chunk, tmp_path):
    hidden, weight, targets = (tensor.double() if tensor.is_floating_point() else tensor for tensor in example())
    hidden.requires_grad_()
    weight.requires_grad_()
    log_p = (hidden @ weight.t() / 0.7).log_softmax(-1)
    log_probs, entropy = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    scale = torch.arange(1.0, TOKENS + 1)
    ((log_probs * scale).sum() + (entropy * scale.flip(0)).sum()).backward()

    reports = run_ranks(world, statistics, tmp_path, padded, chunk, preload=PRELOAD)

    for report in reports:
        for found, expected in zip(report, (log_probs, entropy, hidden.grad)):
            torch.testing.assert_close(torch.tensor(found).double(), expected.detach(), atol=1e-4, rtol=1e-4)
    of_weight = torch.cat([torch.tensor(report[3]) for report in reports])
    torch.testing.assert_close(of_weight[:VOCABULARY].double(), weight.grad, atol=1e-4, rtol=1e-4)
    assert not of_weight[VOCABULARY:].any(), "padding gets no gradient"
