"""Packed attention equals transformers' own attention on one sample at a time, for several families."""

import pytest
import torch

from rlcore.errors import ModelError
from rlcore.models import attention
from rlcore.models.attention import Packing, packed_attention
from rlcore.models.head import TokenHead, hidden_states
from rlcore.models.load import load_model
from tests.models import FAMILIES, TRAINED, make_model, random_ids, trained_model

LENGTHS = [9, 3, 1, 12, 9, 7, 2]
"""Four buckets: samples share one when the shortest fills three quarters of the longest."""


def pair(name):
    """Return transformers' own model, and the same weights with packed attention."""
    attention.register()
    if name in TRAINED:
        path = trained_model(name)
        return load_model(path, attention="eager"), load_model(path, attention=attention.NAME)
    own = make_model(name)
    packed = make_model(name, attention=attention.NAME)
    packed.load_state_dict(own.state_dict())
    return own, packed


def packed_logits(model, samples):
    """Return [T, V] logits of all samples, computed in one pass."""
    ids = torch.tensor([token for sample in samples for token in sample])
    packing = Packing([len(sample) for sample in samples], "cpu")
    return TokenHead(model).logits(hidden_states(model, ids[None], packing))


def single_logits(model, samples):
    """Return [T, V] logits of all samples, computed one by one without rlcore."""
    return torch.cat([model(torch.tensor([sample]), use_cache=False).logits[0] for sample in samples])


@pytest.mark.parametrize("name", [*FAMILIES, *TRAINED])
def test_packed_forward_and_gradient_equal_one_sample_at_a_time(name):
    own, packed = pair(name)
    # the pretrained model attends so sharply that transformers' own eager and sdpa gradients differ by 5e-4
    tolerance = 2e-3 if name in TRAINED else 1e-4
    samples = random_ids(LENGTHS)
    generator = torch.Generator().manual_seed(1)

    expected = single_logits(own, samples)
    found = packed_logits(packed, samples)
    direction = torch.randn(expected.shape, generator=generator) / len(expected)
    (expected * direction).sum().backward()
    (found * direction).sum().backward()

    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
    own_gradients = dict(own.named_parameters())
    for parameter_name, parameter in packed.named_parameters():
        expected_gradient = own_gradients[parameter_name].grad
        scale = float(expected_gradient.norm())
        assert float((parameter.grad - expected_gradient).norm()) <= tolerance * scale, parameter_name
        assert scale > 0, parameter_name


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_window_of_a_family_is_shorter_than_the_samples_and_matters(name):
    windowed = make_model(name)
    wide = make_model(name, sliding_window=64)
    samples = random_ids([12])

    with torch.no_grad():
        difference = (single_logits(windowed, samples) - single_logits(wide, samples)).abs().amax(-1)

    assert float(difference[:4].max()) == 0.0
    assert float(difference[4:].min()) > 1e-3


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("changed", range(len(LENGTHS)))
def test_changing_one_sample_leaves_the_bits_of_all_others(name, changed):
    attention.register()
    model = make_model(name, attention=attention.NAME)
    samples = random_ids(LENGTHS)
    others = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)) != changed
    with torch.no_grad():
        before = packed_logits(model, samples)
        samples[changed] = [60 - token + 3 for token in samples[changed]]
        after = packed_logits(model, samples)

    assert torch.equal(after[others], before[others])
    assert not torch.equal(after[~others], before[~others])


def test_a_token_never_sees_the_tokens_after_it():
    attention.register()
    model = make_model("qwen2", attention=attention.NAME)
    samples = random_ids([8, 8])
    with torch.no_grad():
        before = packed_logits(model, samples)
        samples[0][5] = samples[0][5] % 50 + 4
        after = packed_logits(model, samples)

    same = (after == before).all(-1)
    assert same.tolist() == [True] * 5 + [False] * 3 + [True] * 8


@pytest.mark.parametrize(
    ("lengths", "buckets"),
    [
        ([4, 4, 4], [(3, 4, True)]),
        ([4, 3, 2], [(2, 4, False), (1, 2, True)]),
        ([2, 9, 0, 2, 7], [(2, 9, False), (2, 2, False)]),
        ([5], [(1, 5, True)]),
        ([0, 6, 0], [(1, 6, True)]),
        ([0, 0], []),
        ([], []),
    ],
    ids=["equal", "similar", "far apart", "one", "one of empty", "only empty", "none"],
)
def test_samples_of_similar_length_share_a_bucket_and_equal_neighbors_are_not_copied(lengths, buckets):
    packing = Packing(lengths, "cpu")

    assert [(b.num_samples, b.longest, b.index is None) for b in packing.buckets] == buckets
    assert packing.position_ids.tolist() == [[place for length in lengths for place in range(length)]]


def test_merge_restores_the_order_of_tokens():
    lengths = [2, 9, 3, 7, 1]
    packing = Packing(lengths, "cpu")
    numbers = torch.arange(sum(lengths))
    outputs = []
    for bucket in packing.buckets:
        index = numbers[bucket.start : bucket.stop] if bucket.index is None else numbers[bucket.index]
        outputs.append(index if bucket.places is None else index[bucket.places])

    assert packing.merge(outputs).tolist() == numbers.tolist()


@pytest.mark.parametrize("option", ["s_aux", "sinks", "head_mask"])
def test_option_that_changes_attention_is_refused(option):
    module = torch.nn.Linear(1, 1)
    states = torch.zeros(1, 1, 1, 4)

    with pytest.raises(ModelError, match=f"Linear requires attention with '{option}'.*\nNo backend takes it"):
        packed_attention(module, states, states, states, None, packing=Packing([1], "cpu"), **{option: torch.ones(1)})


def test_mask_that_a_layer_makes_itself_is_refused():
    module = torch.nn.Linear(1, 1)
    states, mask = torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 1)

    with pytest.raises(ModelError, match=r"Linear requires attention with 'a custom mask'.*\nNo backend takes it"):
        packed_attention(module, states, states, states, mask, packing=Packing([1], "cpu"), sliding_window=3)
