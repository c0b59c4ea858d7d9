"""Batch: rules, errors, and cases in which a well-known batch type gives surprising results."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

from rlcore.data.batch import Batch
from rlcore.data.shares import balanced_order, even_sizes
from rlcore.testing.waiting import HANG_S


def make() -> Batch:
    return Batch.of(
        lengths=[2, 1, 3],
        tokens={"input_ids": [1, 2, 3, 4, 5, 6], "loss_mask": [False, True, True, False, True, True]},
        rows={"reward": [0.5, float("nan"), 2.0], "prompt_id": [7, 8, 9], "answer": ["a", "b", "c"]},
    )


def test_columns_keep_their_level_and_dtype():
    batch = make()

    assert [batch.level(name) for name in batch.columns] == ["token", "token", "row", "row", "object"]
    assert batch["reward"].dtype == torch.float32
    assert batch["prompt_id"].dtype == torch.int64
    assert batch["answer"].tolist() == ["a", "b", "c"]


def test_a_host_starts_without_the_compiler_that_tensordict_brings():
    program = (
        "import sys, rlcore.controller.host; sys.exit(sum(m in sys.modules for m in ('tensordict', 'torch._dynamo')))"
    )

    assert subprocess.run([sys.executable, "-c", program], timeout=HANG_S, check=False).returncode == 0


def test_take_reorders_rows_with_their_tokens():
    taken = make().take([2, 0])

    assert taken["input_ids"].tolist() == [4, 5, 6, 1, 2]
    assert taken["answer"].tolist() == ["c", "a"]
    assert taken.lengths.tolist() == [3, 2]


def test_take_accepts_masks_negative_and_no_rows():
    batch = make()

    assert batch.take([True, False, True])["prompt_id"].tolist() == [7, 9]
    assert batch.take([-1])["prompt_id"].tolist() == [9]
    assert len(batch.take([])) == 0
    assert batch.take([]).columns == batch.columns


@pytest.mark.parametrize("index", [[3], [-4], [0.5], "a"], ids=["too large", "too small", "float", "text"])
def test_take_refuses_rows_that_do_not_exist(index):
    with pytest.raises((IndexError, ValueError, TypeError)):
        make().take(index)


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (2, 1), (0, 4)])
def test_slice_refuses_rows_that_do_not_exist(start, stop):
    with pytest.raises(IndexError, match=f"rows {start}:{stop} of a batch with 3 rows"):
        make().slice(start, stop)


def test_take_names_the_row_that_does_not_exist():
    with pytest.raises(IndexError, match="row -5 of a batch"):
        make().take([0, -5])
    with pytest.raises(IndexError, match="a mask of"):
        make().take(torch.ones(3, 3, dtype=torch.bool))


def test_split_and_cat_are_inverse_for_every_cut():
    batch = make()

    for sizes in ([3], [1, 2], [0, 3, 0], [1, 1, 1]):
        again = Batch.cat(batch.split(sizes))
        assert again["input_ids"].tolist() == batch["input_ids"].tolist()
        assert again["answer"].tolist() == ["a", "b", "c"]


def test_split_shares_memory():
    batch = make()

    part = batch.split([1, 2])[1]

    assert part["input_ids"].data_ptr() == batch["input_ids"][2:].data_ptr()


def test_repeat_puts_copies_side_by_side():
    assert make().repeat(2)["prompt_id"].tolist() == [7, 7, 8, 8, 9, 9]


def test_repeat_needs_a_number():
    with pytest.raises(TypeError):
        make().repeat()


def test_operations_do_not_change_their_batch():
    batch = make()
    before = batch.columns

    batch.with_rows(new=[1, 2, 3])
    batch.drop("reward")
    batch.rename(reward="score")
    batch.merge(Batch.of(lengths=[2, 1, 3], rows={"more": [1, 2, 3]}))
    batch.take([0])

    assert batch.columns == before
    assert len(batch) == 3


def test_columns_of_a_selection_are_not_shared_with_the_original_mapping():
    batch = make()

    selected = batch.select("input_ids")

    assert selected.columns == ["input_ids"]
    assert "reward" in batch


def test_missing_column_names_the_nearest():
    with pytest.raises(KeyError, match="Did you mean 'reward'"):
        make()["rewrd"]
    with pytest.raises(KeyError, match="no column 'typo'"):
        make().select("typo")
    with pytest.raises(KeyError, match="no column 'typo'"):
        make().drop("typo")
    with pytest.raises(KeyError, match="no column 'typo'"):
        make().rename(typo="x")


def test_rows_are_not_chosen_with_brackets():
    with pytest.raises(TypeError, match="take"):
        make()[0]


def test_merge_treats_equal_columns_with_nan_as_equal():
    merged = make().merge(make())

    assert merged.columns == make().columns


def test_merge_refuses_other_values():
    with pytest.raises(ValueError, match="'prompt_id' is in both"):
        make().merge(make().with_rows(prompt_id=[7, 8, 10]))
    with pytest.raises(ValueError, match="'answer' is in both"):
        make().merge(make().with_rows(answer=["a", "b", "x"]))


def test_merge_refuses_a_row_column_for_a_token_column_even_where_each_row_is_one_token():
    values = torch.tensor([1.0, 2.0])
    with pytest.raises(ValueError, match="'x' is in both"):
        Batch.of(lengths=[1, 1], rows={"x": values}).merge(Batch.of(lengths=[1, 1], tokens={"x": values}))


def test_numpy_numbers_become_a_numeric_column():
    batch = Batch.of(lengths=[1, 1], rows={"whole": [np.int64(1), 2], "real": [np.float32(0.5), 1]})
    assert (batch["whole"].dtype, batch["real"].dtype) == (torch.int64, torch.float32)


def test_merge_refuses_other_rows():
    with pytest.raises(ValueError, match="same rows"):
        make().merge(make().take([0, 1]))
    with pytest.raises(ValueError, match="same rows"):
        make().merge(Batch.of(lengths=[3, 1, 2], tokens={"x": range(6)}))


def test_merge_with_a_batch_without_columns_changes_nothing():
    assert make().merge(Batch.of(lengths=[2, 1, 3])).columns == make().columns


def test_cat_names_the_column_that_is_only_in_one():
    with pytest.raises(ValueError, match="answer"):
        Batch.cat([make(), make().drop("answer")])
    with pytest.raises(ValueError, match="at least one"):
        Batch.cat([])


def test_one_name_is_one_column():
    with pytest.raises(ValueError, match="two columns named 'x'"):
        Batch.of(lengths=[1], tokens={"x": [1]}, rows={"x": [1]})
    with pytest.raises(ValueError, match="two columns named 'prompt_id'"):
        make().rename(reward="prompt_id")


def test_wrong_column_length_is_refused():
    with pytest.raises(ValueError, match="token column 'x' has 2 values for 3 tokens"):
        Batch.of(lengths=[3], tokens={"x": [1, 2]})
    with pytest.raises(ValueError, match="row column 'r' has 2 values for 1 rows"):
        Batch.of(lengths=[3], rows={"r": [1, 2]})


def test_inputs_are_not_changed():
    tokens, rows = {"x": [1, 2]}, {"r": ["a"]}

    Batch.of(lengths=[2], tokens=tokens, rows=rows)

    assert (tokens, rows) == ({"x": [1, 2]}, {"r": ["a"]})


def test_objects_may_be_lists_and_dicts():
    batch = Batch.of(lengths=[1, 1], rows={"messages": [[{"role": "user"}], [{"role": "user"}]], "n": [None, 3]})

    assert batch.take([1])["messages"][0] == [{"role": "user"}]
    assert batch["n"].tolist() == [None, 3]


def test_out_of_band_pickle_carries_no_column_inside():
    batch = Batch.of(
        lengths=[1000], tokens={"h": torch.randn(1000).bfloat16(), "m": torch.ones(1000, dtype=torch.bool)}
    )
    buffers = []

    stream = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    again = pickle.loads(stream, buffers=buffers)

    assert len(stream) < 500
    assert sum(len(buffer.raw()) for buffer in buffers) == 2000 + 1000 + 8
    assert again["h"].dtype == torch.bfloat16
    assert torch.equal(again["h"], batch["h"])


@pytest.mark.parametrize("protocol", [4, 5])
def test_pickle_round_trip_keeps_everything(protocol):
    batch = make()

    again = pickle.loads(pickle.dumps(batch, protocol))

    assert again.merge(batch).columns == batch.columns
    assert again.lengths.tolist() == [2, 1, 3]


def test_empty_batch_survives_a_pickle():
    again = pickle.loads(pickle.dumps(make().take([]), 5))

    assert len(again) == 0
    assert again.columns == make().columns


def test_row_values_spread_over_tokens_and_back():
    batch = make()

    assert batch.per_token("prompt_id").tolist() == [7, 7, 8, 9, 9, 9]
    assert batch.per_row(torch.ones(6)).tolist() == [2.0, 1.0, 3.0]


@pytest.mark.parametrize(
    ("rows", "parts", "sizes"), [(5, 2, [3, 2]), (2, 4, [1, 1, 0, 0]), (0, 2, [0, 0]), (6, 3, [2, 2, 2])]
)
def test_even_sizes_use_every_row(rows, parts, sizes):
    assert even_sizes(rows, parts) == sizes


def test_balance_evens_out_tokens_and_keeps_every_row():
    lengths = np.array([100, 1, 1, 100, 50, 50])

    order = balanced_order(lengths, 2)

    assert sorted(order.tolist()) == [0, 1, 2, 3, 4, 5]
    assert abs(lengths[order[:3]].sum() - lengths[order[3:]].sum()) <= 2
    assert make().balance(3).take([]).columns == make().columns
