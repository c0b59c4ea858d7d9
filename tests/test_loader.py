"""`PromptLoader`: the order of prompts, and resuming after a kill at any point."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.data.loader import Issued, PromptLoader, mix
from rlcore.errors import ConfigError

QUICK = settings(derandomize=True, max_examples=100)
sizes = st.integers(1, 12)
seeds = st.integers(-(2**63), 2**64)


def through_json(state):
    return json.loads(json.dumps(state))


def test_seeds_are_the_documented_mix():
    # splitmix64 of the state 0 is 0xE220A8397B1DCDAF, the first value of the published generator seeded with 0.
    assert mix(0) == 0xE220A8397B1DCDAF >> 1
    assert mix(1, 2) != mix(2, 1)
    assert 0 <= mix(-5, 2**80) < 2**63


def test_order_and_seeds_never_change():
    loader = PromptLoader(num_prompts=5, seed=0)

    steps = [[issued.prompt_id for issued in loader.issue(3)] for _ in range(4)]

    assert steps == [[0, 2, 1], [4, 3, 3], [2, 4, 1], [0, 2, 1]]
    assert PromptLoader(5, 0).issue(1) == [Issued(prompt_id=0, epoch=0, position=0, request_seed=6017775124710473527)]


def test_without_shuffle_the_order_is_that_of_the_data():
    loader = PromptLoader(num_prompts=3, seed=7, shuffle=False)

    assert [(one.epoch, one.prompt_id) for one in loader.issue(4)] == [(0, 0), (0, 1), (0, 2), (1, 0)]


@QUICK
@given(num_prompts=sizes, prompts_per_step=sizes, seed=seeds, epochs=st.integers(1, 4))
def test_each_epoch_takes_every_prompt_once(num_prompts, prompts_per_step, seed, epochs):
    loader = PromptLoader(num_prompts, seed)
    taken = []
    while len(taken) < epochs * num_prompts:
        step = loader.issue(prompts_per_step)
        assert len(step) == prompts_per_step
        taken += step

    assert [one.position for one in taken] == list(range(len(taken)))
    for epoch in range(epochs):
        assert sorted(one.prompt_id for one in taken if one.epoch == epoch)[:num_prompts] == list(range(num_prompts))
    assert len({one.request_seed for one in taken}) == len(taken)


def test_seed_and_epoch_change_the_order():
    orders = {
        tuple(one.prompt_id for one in PromptLoader(50, seed).issue(100)[start : start + 50])
        for seed in (0, 1, 2)
        for start in (0, 50)
    }

    assert len(orders) == 6


@QUICK
@given(
    num_prompts=sizes,
    seed=st.integers(0, 3),
    actions=st.lists(st.tuples(st.sampled_from(["issue", "finish", "consume", "kill"]), sizes), max_size=40),
)
def test_kill_at_any_point_consumes_each_position_once_in_order(num_prompts, seed, actions):
    """Simulated run: after a kill, the outstanding prompts are issued in order, then the following ones."""
    loader = PromptLoader(num_prompts, seed)
    reference = {one.position: one for one in PromptLoader(num_prompts, seed).issue(12 * 40)}
    in_flight, finished, consumed, waiting, next_position = [], [], [], [], 0
    for action, count in actions:
        if action == "issue":
            fresh = max(count - len(waiting), 0)
            expected = waiting[:count] + list(range(next_position, next_position + fresh))
            assert loader.issue(count) == [reference[position] for position in expected]
            waiting, next_position = waiting[count:], next_position + fresh
            in_flight += expected
        elif action == "finish":
            # From the end: responses finish in any order.
            in_flight, done = in_flight[:-count], in_flight[-count:]
            loader.finish(done)
            finished += done
        elif action == "consume":
            done, finished = finished[:count], finished[count:]
            loader.consume(done)
            consumed += done
        else:
            state = through_json(loader.state_dict())
            loader = PromptLoader(num_prompts, seed)
            loader.load_state_dict(state)
            waiting, in_flight, finished = sorted(waiting + in_flight + finished), [], []
            assert loader.state_dict() == state
        assert loader.outstanding == sorted(waiting + in_flight + finished)
    assert len(set(consumed)) == len(consumed)
    assert sorted(consumed + loader.outstanding) == list(range(next_position))


def test_loading_a_loaders_own_state_issues_outstanding_prompts_again():
    loader = PromptLoader(10, seed=3)
    first = loader.issue(4)
    loader.finish([0, 1])
    loader.consume([1])

    loader.load_state_dict(loader.state_dict())

    assert [one.position for one in loader.issue(4)] == [0, 2, 3, 4]
    assert PromptLoader(10, seed=3).issue(4) == first


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda loader: loader.finish([0, 9]), r"positions \[9\] are not in flight"),
        (lambda loader: loader.finish([1]), r"positions \[1\] are not in flight"),
        (lambda loader: loader.finish([0, 0]), r"named twice"),
        (lambda loader: loader.consume([1, 0]), r"positions \[0\] are not finished and waiting"),
    ],
    ids=["never issued", "finished twice", "named twice", "not finished"],
)
def test_invalid_position_is_refused_and_changes_nothing(call, problem):
    loader = PromptLoader(4, seed=0)
    loader.issue(2)
    loader.finish([1])

    with pytest.raises(ValueError, match=problem):
        call(loader)

    assert loader.outstanding == [0, 1]
    loader.finish([0])
    loader.consume([0, 1])
    assert loader.outstanding == []


@pytest.mark.parametrize(
    ("changed", "first_line"),
    [
        ({"num_prompts": 9}, "the checkpoint was made with 8 prompts; the dataset has 9 now"),
        ({"seed": 6}, "the checkpoint was made with run.seed=5, not 6"),
        ({"shuffle": False}, "the checkpoint was made with data.shuffle=True, not False"),
        ({"fingerprint": "bb"}, "the prompts differ from those of the checkpoint (fingerprint bb, then aa)"),
        (
            {"columns": {"answer": "2", "level": "1"}},
            "the data differs from that of the checkpoint in the column answer",
        ),
        ({"columns": {"level": "1"}}, "the data differs from that of the checkpoint in the column answer"),
        ({"columns": {}}, "the data differs from that of the checkpoint in the columns answer, level"),
        (
            {"samples_per_prompt": 2},
            "the checkpoint was made with sampling.samples_per_prompt=4, not 2: sample ids would repeat",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_state_of_another_run_is_refused(changed, first_line):
    made_with = {"num_prompts": 8, "seed": 5, "fingerprint": "aa", "samples_per_prompt": 4}
    made_with["columns"] = {"answer": "1", "level": "1"}
    state = PromptLoader(**made_with).state_dict()

    with pytest.raises(ConfigError) as caught:
        PromptLoader(**{**made_with, **changed}).load_state_dict(state)

    assert str(caught.value).splitlines()[0] == first_line


def test_prompts_per_step_may_change_on_resume():
    loader = PromptLoader(8, seed=5)
    loader.issue(3)
    other = PromptLoader(8, seed=5)

    other.load_state_dict(through_json(loader.state_dict()))

    assert [one.position for step in (1, 2) for one in other.issue(2)] == [0, 1, 2, 3]


def test_no_prompts_are_refused():
    with pytest.raises(ConfigError):
        PromptLoader(0, seed=0)


def test_a_state_without_columns_or_samples_per_prompt_is_accepted():
    state = PromptLoader(8, seed=5).state_dict()
    del state["columns"], state["samples_per_prompt"]
    loader = PromptLoader(8, seed=5, columns={"answer": "1"}, samples_per_prompt=4)

    loader.load_state_dict(state)

    assert loader.state_dict()["columns"] == {"answer": "1"}


def test_a_new_column_is_accepted():
    state = PromptLoader(8, seed=5, columns={"answer": "1"}).state_dict()

    PromptLoader(8, seed=5, columns={"answer": "1", "more": "2"}).load_state_dict(state)
