"""Units: rows with one `unit_id` stay together wherever rows are divided, and shares stay fair by tokens."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlcore.controller.dispatch import DataParallel
from rlcore.controller.ref import BatchRef
from rlcore.data.batch import Batch
from rlcore.data.shares import share_sizes
from rlcore.data.units import whole_units
from rlcore.errors import ColumnError
from rlcore.protocols import Unit
from rlcore.protocols.dispatch import Call
from rlcore.testing.fakes import FakeStore
from rlcore.types import Counts, Mesh
from rlcore.workers.model import TrainedWorker

units_of_lengths = st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=4), max_size=16)


def batch_of(units, **rows):
    """Return a batch with these units, each a list of lengths in tokens."""
    unit_id = [7 * number for number, unit in enumerate(units) for _ in unit]
    lengths = [length for unit in units for length in unit]
    ids = torch.arange(sum(lengths))
    rows = {"row": np.arange(len(lengths)), "unit_id": np.array(unit_id, dtype=np.int64), **rows}
    return Batch.of(lengths=np.array(lengths, dtype=np.int64), tokens={"input_ids": ids}, rows=rows)


def as_ref(batch):
    return BatchRef.publish(batch, FakeStore())


def shares(batch, dp_size):
    meshes = [Mesh(rank=rank, world_size=dp_size, dp_rank=rank, dp_size=dp_size) for rank in range(dp_size)]
    return [call.args[0] for call in DataParallel().split(Call((batch,)), meshes)]


@pytest.mark.parametrize("kind", [lambda batch: batch, as_ref], ids=["batch", "reference"])
@given(units=units_of_lengths, dp_size=st.integers(1, 5))
def test_every_unit_is_in_one_share_with_its_rows_in_order(kind, units, dp_size):
    batch = batch_of(units)

    parts = [share for share in shares(kind(batch).balance(dp_size), dp_size) if len(share)]

    found = [(unit, row) for part in parts for unit, row in zip(*(c.tolist() for c in part.fetch("unit_id", "row")))]
    assert sorted(found) == list(zip(batch["unit_id"].tolist(), batch["row"].tolist()))
    assert sum(len(part.unit_sizes()) for part in parts) == len(units)
    assert all(row == before + 1 for (last, before), (unit, row) in pairwise(found) if unit == last)


@given(units_of_lengths, st.integers(2, 5))
def test_numbers_of_units_differ_by_at_most_one(units, dp_size):
    sizes = [len(share.unit_sizes()) for share in shares(batch_of(units).balance(dp_size), dp_size)]

    assert max(sizes) - min(sizes) <= 1


def test_balanced_shares_of_pairs_have_about_the_same_number_of_tokens():
    # pairs of 100, 90, 40, 30 tokens: the longest first, to the lightest share that has room
    batch = batch_of([[60, 40], [45, 45], [20, 20], [10, 20]])

    balanced = batch.balance(2)

    assert [share.num_tokens for share in shares(balanced, 2)] == [130, 130]
    assert balanced["row"].tolist() == [0, 1, 6, 7, 2, 3, 4, 5]


def test_balance_of_units_of_one_row_is_that_of_rows():
    batch = batch_of([[length] for length in (100, 1, 1, 100, 50, 50)])

    assert batch.balance(2)["row"].tolist() == batch.drop("unit_id").balance(2)["row"].tolist()


def test_shares_have_as_many_units_not_rows():
    assert share_sizes(np.array([1, 3, 1, 2]), 2) == [4, 3]
    assert share_sizes(np.array([2]), 3) == [2, 0, 0]
    assert share_sizes(np.array([], dtype=np.int64), 2) == [0, 0]


def test_other_batches_of_a_call_are_split_at_the_same_rows():
    batch, meshes = batch_of([[1], [1, 1, 1]]), [Mesh(rank=r, world_size=2, dp_rank=r, dp_size=2) for r in range(2)]

    calls = DataParallel().split(Call((batch.drop("unit_id"),), {"other": batch}), meshes)

    assert [len(call.args[0]) for call in calls] == [len(call.kwargs["other"]) for call in calls] == [1, 3]


def test_batches_of_a_call_with_different_units_are_refused():
    call = Call((batch_of([[1], [1, 1, 1]]), batch_of([[1, 1], [1, 1]])))

    with pytest.raises(ValueError, match="dp: batches with different units cannot be split together: 1, 2"):
        DataParallel().split(call, [Mesh(rank=rank, world_size=2, dp_rank=rank, dp_size=2) for rank in range(2)])


@pytest.mark.parametrize("use", [lambda b: b.balance(1), lambda b: shares(b, 2), lambda b: b.per_unit(b["row"])])
def test_a_unit_whose_rows_are_apart_is_refused(use):
    batch = batch_of([[1, 1], [1, 1]]).take([0, 2, 1, 3])

    with pytest.raises(ValueError, match=r"unit_id=0 are not adjacent.*\nSort the rows:  batch.take\(.*'unit_id'"):
        use(batch)


def test_rows_are_summed_over_their_unit():
    batch = batch_of([[1, 1], [1], [1, 1, 1]])

    assert batch.per_unit(torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])).tolist() == [3.0, 4.0, 56.0]
    assert batch.drop("unit_id").per_unit(batch["row"]).tolist() == batch["row"].tolist()
    assert batch.unit_sizes().tolist() == [2, 1, 3]


@pytest.mark.parametrize("kind", [lambda batch: batch, as_ref], ids=["batch", "reference"])
def test_incomplete_units_are_left_out_whole(kind):
    samples = kind(batch_of([[1, 2], [3], [4, 5]], pair=[1, 1, 2, 3, 3]).drop("unit_id"))

    whole, num_incomplete = whole_units(samples, Unit(column="pair", size=2))

    assert num_incomplete == 1
    assert whole.fetch("row").tolist() == [0, 1, 3, 4]
    assert whole.fetch("unit_id").tolist() == [1, 1, 3, 3]


def test_a_unit_of_any_size_is_complete():
    whole, num_incomplete = whole_units(batch_of([[1, 2], [3]]), Unit(column="unit_id"))

    assert (len(whole), num_incomplete) == (3, 0)


@pytest.mark.parametrize("kind", [lambda batch: batch, as_ref], ids=["batch", "reference"])
def test_a_step_without_samples_has_no_units(kind):
    samples = kind(batch_of([], pair=[]).drop("unit_id"))

    whole, num_incomplete = whole_units(samples, Unit(column="pair", size=2))

    assert (len(whole), num_incomplete) == (0, 0)
    assert whole.fetch("unit_id").dtype == torch.int64


def test_a_unit_with_too_many_rows_is_refused():
    with pytest.raises(ValueError, match=r"3 rows have pair=5, but a unit has size=2\nIn collect, take 2 rows"):
        whole_units(batch_of([[1], [1, 1, 1], [2]], pair=[4, 5, 5, 5, 6]), Unit(column="pair", size=2))


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("pair_id", r"unit column 'pair_id' does not exist. Did you mean 'pairid'\?\nAdd it in collect:  samples.with"),
        ("weight", "unit column 'weight' is not a row column of int64"),
        ("input_ids", "unit column 'input_ids' is not a row column of int64"),
        ("name", "unit column 'name' is not a row column of int64"),
    ],
)
def test_a_unit_column_that_cannot_be_used_is_named(column, message):
    samples = batch_of([[1, 2]], pairid=[1, 1], weight=[0.5, 0.5], name=["a", "b"])

    with pytest.raises(ColumnError, match=message):
        whole_units(samples, Unit(column=column, size=2))


def test_an_update_without_the_units_of_its_algorithm_is_refused():
    worker = SimpleNamespace(algorithm=SimpleNamespace(unit=Unit(column="group_id", size=2)))

    with pytest.raises(ColumnError, match=r"compares the rows with one 'group_id', .* no 'unit_id'\nInherit `update`"):
        TrainedWorker.update.function(worker, batch_of([[1, 2]]).drop("unit_id"), Counts(rows=2, tokens=3))
