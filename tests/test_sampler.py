"""Sampling of tokens: exactly the documented distribution, independent of the rest of the batch."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlcore.config.schema import SamplingConfig
from rlcore.errors import ConfigError
from rlcore.rollouts import sampler
from rlcore.rollouts.sampler import SamplingArrays, draw, invert, penalized, probabilities, uniforms
from rlcore.types import Request, Sampling

FIVE = torch.tensor([0.10, 0.40, 0.05, 0.30, 0.15]).log()
"""Most likely first: tokens 1, 3, 4, 0, 2; cumulative 0.40, 0.70, 0.85, 0.95, 1."""


def arrays(*sampling, seeds=None):
    requests = [
        Request(request_id=i, prompt_ids=[1], sampling=one, seed=i if seeds is None else seeds[i])
        for i, one in enumerate(sampling)
    ]
    return SamplingArrays.of(requests)


def distribution(logits, **options):
    return probabilities(logits[None], arrays(Sampling(**options)))[0].tolist()


def kept(logits, **options):
    return {token for token, p in enumerate(distribution(logits, **options)) if p > 0}


def draws(logits, number, **options):
    """Return [number] tokens and their log-probs, one seed each."""
    asked = arrays(*[Sampling(**options)] * number)
    return draw(logits.expand(number, -1), asked, torch.full((number,), 5))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 1}, {1}),
        ({"top_k": 3}, {1, 3, 4}),
        ({"top_k": 9}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.39}, {1}),
        ({"top_p": 0.41}, {1, 3}),
        ({"top_p": 0.69}, {1, 3}),
        ({"top_p": 0.71}, {1, 3, 4}),
        ({"top_p": 0.96}, {0, 1, 2, 3, 4}),
        ({"top_p": 1e-9}, {1}),
        ({"min_p": 0.74}, {1, 3}),  # at least 0.296
        ({"min_p": 0.76}, {1}),  # at least 0.304
        ({"min_p": 0.2}, {0, 1, 3, 4}),
        ({"min_p": 1.0}, {1}),
        # top-p of what top-k left: 0.4 / 0.7 = 0.571 of it is token 1
        ({"top_k": 2, "top_p": 0.57}, {1}),
        ({"top_k": 2, "top_p": 0.58}, {1, 3}),
        ({"top_k": 3, "top_p": 0.75}, {1, 3}),  # 0.7 / 0.85 = 0.82; without top-k it would be three
        ({"top_p": 0.8, "min_p": 0.5}, {1, 3}),
        ({"top_k": 4, "top_p": 0.99, "min_p": 0.3}, {1, 3, 4}),
        # half the temperature squares the odds: 16 : 9 : 2.25 : 1 : 0.25, in all 28.5; token 1 has 0.561
        ({"temperature": 0.5, "top_p": 0.56}, {1}),
        ({"temperature": 0.5, "top_p": 0.57}, {1, 3}),
        ({"temperature": 0.5, "min_p": 0.5}, {1, 3}),  # 9 / 16 = 0.5625
        ({"temperature": 0.5, "min_p": 0.57}, {1}),
        ({"temperature": 0.0, "top_k": 3, "top_p": 0.5}, {1}),
    ],
    ids=str,
)
def test_truncation_keeps_exactly_the_documented_tokens(options, expected):
    found = distribution(FIVE, **options)
    temperature = options.get("temperature", 1.0) or 1.0
    odds = [math.exp(float(x) / temperature) if token in expected else 0.0 for token, x in enumerate(FIVE)]

    assert kept(FIVE, **options) == expected
    assert found == pytest.approx([x / sum(odds) for x in odds], abs=1e-6)


@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_p": 0.5}, {"temperature": 0.0}], ids=str)
def test_ties_go_to_the_lower_ids(options):
    expected = {0} if "temperature" in options else {0, 1}

    assert kept(torch.zeros(4), **options) == expected


def test_min_p_keeps_all_tokens_of_a_tie():
    assert kept(torch.tensor([1.0, 0.0, 1.0]), min_p=1.0) == {0, 2}


def test_rows_are_truncated_each_in_its_own_way():
    options = [{}, {"top_k": 1}, {"top_p": 0.6}, {"min_p": 0.5}, {"temperature": 0.0}, {"temperature": 2.0, "top_k": 2}]
    together = probabilities(FIVE.expand(6, -1), arrays(*[Sampling(**one) for one in options]))

    for row, one in zip(together, options):
        assert row.tolist() == pytest.approx(distribution(FIVE, **one), abs=1e-6)


@given(st.integers(0, 2**32), st.integers(0, 6), st.floats(0.01, 1.0), st.floats(0.0, 1.0), st.floats(0.2, 3.0))
def test_any_combination_leaves_a_distribution_that_has_the_most_likely_token(seed, top_k, top_p, min_p, temperature):
    logits = 3 * torch.randn(8, generator=torch.Generator().manual_seed(seed))
    options = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "temperature": temperature}

    found = torch.tensor(distribution(logits, **options))

    assert float(found.sum()) == pytest.approx(1.0, abs=1e-5)
    assert float(found[logits.argmax()]) > 0
    assert int((found > 0).sum()) <= (top_k or 8)


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ({"temperature": -0.5}, "temperature: expected 0 .greedy. or more, got -0.5\nType  temperature=1.0"),
        ({"top_k": -1}, "top_k: expected 0 .all tokens. or more, got -1\nType  top_k=0"),
        ({"top_p": 0.0}, "top_p: expected more than 0 and at most 1, got 0.0\nType  top_p=1.0"),
        ({"top_p": 1.1}, "top_p: expected more than 0"),
        ({"min_p": 1.5}, "min_p: expected a number from 0 to 1, got 1.5\nType  min_p=0.0"),
    ],
    ids=str,
)
def test_settings_that_would_leave_no_token_are_refused_when_they_are_read(typed, expected):
    with pytest.raises(ConfigError, match=expected):
        SamplingConfig(**typed)


def test_greedy_takes_the_most_likely_token_whatever_the_seed_and_reports_temperature_1():
    tokens, log_probs = draws(FIVE, 50, temperature=0.0, top_k=3)

    assert tokens.tolist() == [1] * 50
    assert log_probs.tolist() == pytest.approx([math.log(0.4)] * 50, abs=1e-6)


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.5}, {"temperature": 1.7}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.3}],
    ids=str,
)
def test_frequencies_match_the_distribution(options):
    number = 40_000
    expected = torch.tensor(distribution(FIVE, **options))

    tokens, _ = draws(FIVE, number, **options)

    found = torch.bincount(tokens, minlength=5).double()
    possible = expected > 0
    chi_square = ((found - number * expected) ** 2 / (number * expected))[possible].sum()
    assert found[~possible].tolist() == [0.0] * int((~possible).sum())
    # the 0.999 quantile of chi-square with 4 degrees of freedom; seeds are fixed, so this never flickers
    assert float(chi_square) < 18.5


def test_positions_of_one_seed_are_independent_draws():
    number = 20_000
    asked = arrays(*[Sampling()] * number, seeds=[7] * number)

    tokens, _ = draw(FIVE.expand(number, -1), asked, torch.arange(number))

    pairs = torch.bincount(5 * tokens[:-1] + tokens[1:], minlength=25).double()
    expected = (FIVE.exp()[:, None] * FIVE.exp()).reshape(-1) * (number - 1)
    # 0.999 quantile with 24 degrees of freedom
    assert float(((pairs - expected) ** 2 / expected).sum()) < 51.2


@pytest.mark.parametrize("options", [{}, {"temperature": 0.6, "top_k": 2}, {"top_p": 0.5, "min_p": 0.1}], ids=str)
def test_reported_log_prob_is_that_before_any_truncation(options):
    logits = FIVE + 3.0
    tokens, log_probs = draws(logits, 200, **options)
    expected = (logits.double() / options.get("temperature", 1.0)).log_softmax(-1)

    torch.testing.assert_close(log_probs.double(), expected[tokens], atol=1e-6, rtol=1e-6)
    assert len(set(tokens.tolist())) > 1


def test_token_does_not_depend_on_the_neighbors_in_the_batch():
    logits = 2 * torch.randn(12, 50, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(12) * 3
    options = [Sampling(), Sampling(top_k=5), Sampling(top_p=0.7), Sampling(min_p=0.2), Sampling(temperature=0.0)]
    sampling = [options[i % 5] for i in range(12)]
    seeds = [2**40 + i for i in range(12)]

    tokens, log_probs = draw(logits, arrays(*sampling, seeds=seeds), positions)

    for i in range(12):
        alone = draw(logits[i : i + 1], arrays(sampling[i], seeds=[seeds[i]]), positions[i : i + 1])
        assert (int(alone[0]), float(alone[1])) == (int(tokens[i]), float(log_probs[i]))


def test_batch_larger_than_a_chunk_is_drawn_in_parts_with_the_same_result(monkeypatch):
    logits = torch.randn(11, 20, generator=torch.Generator().manual_seed(1))
    asked = arrays(*[Sampling(top_k=i, temperature=0.5 + i / 10) for i in range(11)])
    whole = draw(logits, asked, torch.arange(11))
    monkeypatch.setattr(sampler, "_CHUNK_VALUES", 3 * 20)

    parts = draw(logits, asked, torch.arange(11))

    assert [len(rows) for rows in parts] == [11, 11]
    assert torch.equal(whole[0], parts[0])
    assert torch.equal(whole[1], parts[1])


def splitmix64(state):
    """Compute the generator as published, with Python integers: the finalizer of state + golden ratio."""
    state = (state + 0x9E3779B97F4A7C15) % 2**64
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
    return state ^ (state >> 31)


def test_first_outputs_of_splitmix64_are_the_published_ones():
    # seed 1234567, from the test vectors of the reference implementation
    golden, seed = 0x9E3779B97F4A7C15, 1234567

    assert [splitmix64(seed + i * golden) for i in range(2)] == [6457827717110365317, 3203168211198807973]


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63, 2**64 - 1, 123456789012345])
def test_uniform_numbers_are_the_documented_hash_of_seed_and_position(seed):
    positions = [0, 1, 2, 511, 2**31]
    asked = arrays(*[Sampling()] * 5, seeds=[seed] * 5)
    golden = 0x9E3779B97F4A7C15

    found = uniforms(asked.seeds, torch.tensor(positions))

    mixed = splitmix64(seed % 2**64)
    expected = [splitmix64(mixed + (position - 1) * golden) >> 11 for position in positions]
    assert found.tolist() == [bits * 2.0**-53 for bits in expected]
    assert all(0 <= one < 1 for one in found.tolist())


@pytest.mark.parametrize(
    ("uniform", "expected"),
    # 0, 0.25, 0.25, 1: tokens 0 and 2 have probability 0
    [(0.0, 1), (0.2499, 1), (0.25, 3), (0.5, 3), (1.0 - 2.0**-53, 3), (1.0, 3)],
)
def test_inverse_of_the_cumulative_distribution_never_gives_a_token_of_probability_0(uniform, expected):
    cumulative = torch.tensor([[0.0, 0.25, 0.25, 1.0]], dtype=torch.float64)

    assert invert(cumulative, torch.tensor([uniform], dtype=torch.float64)).tolist() == [expected]


def test_inverse_is_right_when_the_last_tokens_are_impossible_and_the_sum_is_not_1():
    cumulative = torch.tensor([[0.5, 0.99, 0.99, 0.99]], dtype=torch.float64)

    assert invert(cumulative, torch.tensor([1.0 - 2.0**-53], dtype=torch.float64)).tolist() == [1]


def penalized_row(logits, prompt, response, **options):
    request = Request(request_id=0, prompt_ids=prompt, sampling=Sampling(**options), seed=0)
    found = penalized(torch.tensor([logits]), [request], [response])
    return None if found is None else found[0].tolist()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"repetition_penalty": 2.0}, [1.0, -2.0, 0.5, 1.5]),
        ({"presence_penalty": 0.5}, [2.0, -1.5, 0.5, 2.5]),
        ({"frequency_penalty": 0.5}, [2.0, -2.0, 0.5, 2.5]),
        ({"presence_penalty": -1.0}, [2.0, 0.0, 0.5, 4.0]),
        ({"repetition_penalty": 2.0, "presence_penalty": 0.5, "frequency_penalty": 0.25}, [1.0, -3.0, 0.5, 0.75]),
        ({"temperature": 0.5, "top_k": 3}, None),
    ],
)
def test_penalties_by_hand(options, expected):
    # token 0 is in the prompt, 1 twice and 3 once in the response; only the repetition penalty counts the prompt
    assert penalized_row([2.0, -1.0, 0.5, 3.0], [0, 0], [1, 3, 1], **options) == expected


def test_the_repetition_penalty_is_that_of_transformers():
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = torch.randn(30, generator=torch.Generator().manual_seed(1))

    found = penalized_row(logits.tolist(), [3, 5, 7, 3], [9, 5, 11], repetition_penalty=1.7)

    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[3, 5, 7, 3, 9, 5, 11]]), logits[None])[0]
    assert found == pytest.approx(expected.tolist())


@pytest.mark.parametrize("chunk", [2**25, 10])
def test_a_token_of_altered_logits_has_the_log_prob_of_the_model(chunk, monkeypatch):
    monkeypatch.setattr(sampler, "_CHUNK_VALUES", chunk)
    altered = torch.tensor([[-50.0, -50.0, -50.0, -50.0, 0.0]]).expand(3, -1)

    tokens, log_probs = draw(FIVE.expand(3, -1), arrays(*[Sampling()] * 3), torch.arange(3), altered)

    assert tokens.tolist() == [4, 4, 4]
    assert log_probs.exp().tolist() == pytest.approx([0.15] * 3)


def test_bfloat16_logits_are_drawn_from_in_float32():
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(3))
    asked = arrays(*[Sampling()] * 4)

    tokens, log_probs = draw(logits.bfloat16(), asked, torch.arange(4))

    exact = draw(logits.bfloat16().float(), asked, torch.arange(4))
    assert torch.equal(tokens, exact[0])
    assert torch.equal(log_probs, exact[1])
    assert log_probs.dtype == torch.float32
