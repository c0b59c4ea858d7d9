"""Several training sets with weights: the share of each set, each prompt once per epoch of its set, and resuming."""

import json

import numpy as np
import pytest

from rlcore.data.loader import PromptLoader
from rlcore.data.mixture import Mixture
from rlcore.errors import ConfigError

SETS = {"math": (50, 0.6), "code": (7, 0.3), "chat": (400, 0.1)}


def sets_of(weights, seed, count, first=0):
    mixture = Mixture(weights, seed)
    return [mixture.at(position) for position in range(first, first + count)]


@pytest.mark.parametrize("seed", [0, 7, 2**40])
def test_every_stretch_has_the_share_of_each_set(seed):
    numbers = np.array([number for number, _ in sets_of({"a": 6, "b": 3, "c": 1}, seed, 30_000)])

    assert np.bincount(numbers).tolist() == [18_000, 9_000, 3_000]
    for number, share in enumerate((0.6, 0.3, 0.1)):
        taken = np.concatenate([[0], np.cumsum(numbers == number)])
        stretch = taken[100:] - taken[:-100]
        assert abs(stretch - 100 * share).max() <= 3  # also across two blocks


def test_places_count_the_earlier_positions_of_the_same_set():
    counts = {}
    for number, place in sets_of({"a": 1, "b": 2, "c": 0.01}, 3, 25_000):
        assert place == counts.get(number, 0)
        counts[number] = place + 1


def test_the_order_is_seeded_and_does_not_depend_on_what_was_asked_before():
    weights = {"a": 0.37, "b": 0.63}

    assert sets_of(weights, 1, 500, first=9_800) == sets_of(weights, 1, 10_300)[9_800:]
    assert sets_of(weights, 1, 500) != sets_of(weights, 2, 500)


def test_a_weight_that_never_comes_is_refused():
    with pytest.raises(ConfigError, match=r"data.weights.b=1e-05 is less than 0.01 % of the sum"):
        Mixture({"a": 1.0, "b": 0.00001}, 0)
    assert {number for number, _ in sets_of({"a": 9_999, "b": 1}, 0, 10_000)} == {0, 1}


def loader(**changes):
    return PromptLoader(457, **({"seed": 5, "mixture": SETS} | changes))


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_set_has_its_own_epochs(shuffle):
    ids = [item.prompt_id for item in loader(shuffle=shuffle).issue(2_000)]

    for first, size in ((0, 50), (50, 7), (57, 400)):
        its = [prompt_id for prompt_id in ids if first <= prompt_id < first + size]
        for start in range(0, len(its) - size + 1, size):
            epoch = its[start : start + size]
            assert sorted(epoch) == list(range(first, first + size))
            assert (epoch == sorted(epoch)) == (not shuffle)
    assert sum(prompt_id < 50 for prompt_id in ids[:100]) == pytest.approx(60, abs=2)


def test_a_resumed_mixture_continues_where_it_was():
    whole = [item.prompt_id for item in loader().issue(300)]
    one = loader()
    before = one.issue(120)
    one.finish([item.position for item in before[:100]])
    one.consume([item.position for item in before[:100]])
    two = loader()

    two.load_state_dict(json.loads(json.dumps(one.state_dict())))

    assert [item.prompt_id for item in two.issue(200)] == whole[100:]


def test_other_weights_are_refused_and_a_run_without_any_has_the_order_of_before():
    state = loader().state_dict()
    other = {**SETS, "chat": (400, 0.2)}

    with pytest.raises(ConfigError, match=r"was made with data.weights=\{'math': 0.6, 'code': 0.3, 'chat': 0.1\}, not"):
        loader(mixture=other).check(state)
    with pytest.raises(ConfigError, match=r"data.weights=\{\}, not"):
        loader().check(loader(mixture={}).state_dict())
    assert [it.prompt_id for it in loader(mixture={}).issue(20)] == [
        it.prompt_id for it in PromptLoader(457, 5).issue(20)
    ]
