"""Micro-batches: every row once, no budget broken, the same plan every time."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlcore.data.batch import Batch
from rlcore.data.packing import plan_micro_batches


def plan_of(lengths, max_tokens, units=None):
    rows = {} if units is None else {"unit_id": np.array(units, dtype=np.int64)}
    return plan_micro_batches(Batch.of(lengths=lengths, rows=rows), max_tokens)


lengths_and_budget = st.tuples(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 120))


@given(lengths_and_budget)
def test_every_row_is_in_exactly_one_micro_batch_and_rows_keep_their_order(case):
    lengths, max_tokens = case

    plan = plan_of(lengths, max_tokens)

    assert sorted(row for rows in plan for row in rows) == list(range(len(lengths)))
    assert all(rows and rows == sorted(rows) for rows in plan)


@given(lengths_and_budget)
def test_no_micro_batch_exceeds_the_budget_unless_it_is_one_longer_row(case):
    lengths, max_tokens = case

    for rows in plan_of(lengths, max_tokens):
        assert sum(lengths[row] for row in rows) <= max_tokens or len(rows) == 1


@given(lengths_and_budget)
def test_no_two_micro_batches_would_fit_into_one(case):
    lengths, max_tokens = case
    sizes = [sum(lengths[row] for row in rows) for rows in plan_of(lengths, max_tokens)]

    assert all(one + other > max_tokens for one, other in itertools.combinations(sizes, 2))


@given(lengths_and_budget, st.randoms(use_true_random=False))
def test_plan_depends_on_the_lengths_alone(case, random):
    lengths, max_tokens = case
    plan = plan_of(lengths, max_tokens)
    shuffled = random.sample(lengths, len(lengths))

    def shapes(rows_of, values):
        return sorted(sorted(values[row] for row in rows) for rows in rows_of)

    assert plan_of(np.array(lengths, dtype=np.int64), max_tokens) == plan
    assert shapes(plan_of(shuffled, max_tokens), shuffled) == shapes(plan, lengths)


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "expected"),
    [
        # 9 is longer than 8 and alone; 5 opens a bin, 4 finds no room in it (3 left), 3 fills the bin of 5
        ([5, 3, 4, 9], 8, [[3], [0, 1], [2]]),
        ([4, 4], 8, [[0, 1]]),
        # largest first: 4, 4, 4 fill 8 and half of another; 3 joins that one
        ([3, 4, 4, 4], 8, [[1, 2], [0, 3]]),
        ([9, 0, 9], 8, [[0], [2], [1]]),
        ([0, 0], 8, [[0, 1]]),
        ([], 8, []),
    ],
    ids=["too long", "all in one", "decreasing", "too long and empty", "only empty", "no rows"],
)
def test_plan_of_hand_worked_cases(lengths, max_tokens, expected):
    assert plan_of(lengths, max_tokens) == expected


def units_of(sizes):
    return [unit for unit, size in enumerate(sizes) for _ in range(size)]


@given(st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=4), max_size=15), st.integers(1, 120))
def test_units_are_packed_like_rows_of_their_total_length(units, max_tokens):
    lengths = [length for unit in units for length in unit]
    unit_id = units_of([len(unit) for unit in units])

    plan = plan_of(lengths, max_tokens, unit_id)

    as_rows = plan_of([sum(unit) for unit in units], max_tokens)
    assert [sorted({unit_id[row] for row in rows}) for rows in plan] == as_rows
    assert sorted(row for rows in plan for row in rows) == list(range(len(lengths)))
    assert all(rows == sorted(rows) for rows in plan)


def test_a_unit_longer_than_the_budget_is_alone():
    assert plan_of([3, 6, 2, 2], 8, [5, 5, 9, 9]) == [[0, 1], [2, 3]]


def test_units_of_one_row_are_packed_like_rows():
    lengths = [5, 3, 4, 9]

    assert plan_of(lengths, 8, [4, 3, 2, 1]) == plan_of(lengths, 8)


def test_packing_refuses_a_unit_whose_rows_are_apart():
    with pytest.raises(ValueError, match="the rows with unit_id=1 are not adjacent"):
        plan_of([3, 2, 2], 4, [1, 2, 1])
