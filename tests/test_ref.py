"""BatchRef: the operations of Batch on remote columns, without fetching them."""

import pickle

import pytest
import torch

from rlcore.controller.ref import BatchRef
from rlcore.data.batch import Batch


class CountingStore:
    """Store that keeps values in a list and counts those that are fetched."""

    def __init__(self):
        self.values = []
        self.brought = []

    def put(self, values):
        self.values += values
        return list(range(len(self.values) - len(values), len(self.values)))

    def get(self, refs):
        self.brought += refs
        return [self.values[ref] for ref in refs]


def make(store, first=0, rows=3):
    lengths = [1 + (i % 3) for i in range(rows)]
    total = sum(lengths)
    batch = Batch.of(
        lengths=lengths,
        tokens={"input_ids": range(first * 100, first * 100 + total), "mask": [True] * total},
        rows={"reward": [float(first + i) for i in range(rows)], "text": [f"t{first + i}" for i in range(rows)]},
    )
    return batch, BatchRef.publish(batch, store)


def same(ref, batch):
    local = ref.local()
    return (
        local["input_ids"].tolist() == batch["input_ids"].tolist()
        and local["reward"].tolist() == batch["reward"].tolist()
        and local["text"].tolist() == batch["text"].tolist()
        and local.lengths.tolist() == batch.lengths.tolist()
    )


class Reference:
    """Object with the message size of a Ray reference."""

    def __reduce__(self):
        return bytes.fromhex, (f"{id(self):0140x}",)


class References(CountingStore):
    def put(self, values):
        return [Reference() for _ in values]


@pytest.mark.parametrize(("ranks", "rows"), [(1, 512), (8, 512), (32, 64)])
def test_num_bytes_is_the_message_size_of_a_balanced_batch(ranks, rows):
    store = References()
    whole = BatchRef.cat([make(store, rows=rows)[1] for _ in range(ranks)]).take(range(rows * ranks)).balance(ranks)

    shares = whole.split([rows] * ranks)

    pickled = sum(len(pickle.dumps(share, protocol=5)) for share in shares)
    assert sum(share.num_bytes for share in shares) == pytest.approx(pickled, rel=0.15)


OPERATIONS = {
    "take": lambda b: b.take([2, 0, 2]),
    "take of take": lambda b: b.take([2, 1]).take([1, 1, 0]),
    "mask": lambda b: b.take([True, False, True]),
    "slice": lambda b: b.slice(1, 3),
    "split": lambda b: b.split([1, 2])[1],
    "repeat": lambda b: b.repeat(2),
    "balance": lambda b: b.balance(2),
    "nothing": lambda b: b.take([]),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS.keys())
def test_operations_equal_those_of_batch(operation):
    store = CountingStore()
    batch, ref = make(store)

    result = operation(ref)

    assert store.brought == []
    assert same(result, operation(batch))


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS.keys())
def test_operations_on_several_shards_equal_those_of_batch(operation):
    store = CountingStore()
    (a, ref_a), (b, ref_b) = make(store, 0, 2), make(store, 5, 1)

    assert same(operation(BatchRef.cat([ref_a, ref_b])), operation(Batch.cat([a, b])))


def test_only_shards_of_selected_rows_are_fetched():
    store = CountingStore()
    refs = [make(store, first)[1] for first in range(3)]

    BatchRef.cat(refs).take([4, 3]).fetch("input_ids")

    assert len(store.brought) == 1


def test_fetching_numeric_row_columns_reads_nothing_from_the_store():
    store = CountingStore()
    _, ref = make(store)

    assert ref.fetch("reward").tolist() == [0.0, 1.0, 2.0]
    assert store.brought == []


def test_merge_after_reordering_keeps_rows_together():
    store = CountingStore()
    batch, ref = make(store)
    order = [2, 0, 1]
    more = Batch.of(lengths=batch.take(order).lengths, tokens={"seen": range(6)})

    merged = ref.take(order) | BatchRef.publish(more, store)

    assert merged.take([1])["input_ids"].tolist() == [0]
    assert merged.take([1])["seen"].tolist() == [3]


def test_merge_refuses_different_rows_and_conflicting_columns():
    store = CountingStore()
    _, ref = make(store)
    _, other = make(store)

    with pytest.raises(ValueError, match="same rows"):
        ref.merge(ref.take([0]))
    with pytest.raises(ValueError, match="'input_ids' is in both"):
        ref.merge(other)
    assert ref.merge(ref.select("input_ids", "reward")).columns == ref.columns


def test_with_rows_replaces_and_adds():
    store = CountingStore()
    _, ref = make(store)

    changed = ref.with_rows(reward=torch.tensor([9.0, 8.0, 7.0]), note=["x", "y", "z"])

    assert changed.fetch("reward").tolist() == [9.0, 8.0, 7.0]
    assert changed.take([2])["note"].tolist() == ["z"]
    assert ref.fetch("reward").tolist() == [0.0, 1.0, 2.0]


def test_an_unknown_column_is_named():
    _, ref = make(CountingStore())

    with pytest.raises(KeyError, match="Did you mean 'reward'"):
        ref.fetch("rewad")
    with pytest.raises(KeyError, match="no column 'x'"):
        ref.drop("x")


def test_pickling_omits_the_store():
    _, ref = make(CountingStore())

    again = pickle.loads(pickle.dumps(ref.take([1])))

    assert again.store is None
    assert again.columns == ref.columns


def test_controller_memory_does_not_grow_with_tokens():
    store = CountingStore()

    def held(tokens):
        batch = Batch.of(lengths=[tokens] * 4, tokens={"x": torch.zeros(4 * tokens)}, rows={"r": [1.0] * 4})
        return BatchRef.publish(batch, store).take([3, 1]).num_bytes

    assert held(10) == held(10_000)
