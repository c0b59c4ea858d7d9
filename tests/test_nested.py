"""Batches as TensorDicts: a round trip keeps every column, and anything else is refused."""

import pytest
import torch
from tensordict import TensorDict
from torch.nested import nested_tensor, nested_tensor_from_jagged

from rlcore.data.batch import Batch, object_array

OBJECTS = ["same", "same", None, ["x", ["y"]], {"k": [1]}]


def make() -> Batch:
    return Batch.of(
        lengths=[2, 0, 3, 1, 1],
        tokens={"input_ids": [1, 2, 3, 4, 5, 6, 7], "hidden": torch.arange(14.0).view(7, 2).bfloat16()},
        rows={"reward": [0.5, float("nan"), 2.0, 1.0, 0.0], "pair": torch.zeros(5, 2), "any": object_array(OBJECTS)},
    )


def jagged(*lengths: int) -> torch.Tensor:
    return nested_tensor([torch.arange(length) for length in lengths], layout=torch.jagged)


def test_a_round_trip_keeps_every_column():
    batch = make()

    found = Batch.from_tensordict(batch.to_tensordict())

    assert found.lengths.tolist() == batch.lengths.tolist()
    assert {name: found.level(name) for name in found.columns} == {name: batch.level(name) for name in batch.columns}
    assert found["any"].tolist() == OBJECTS
    for name in ("input_ids", "hidden", "reward", "pair"):
        torch.testing.assert_close(found[name], batch[name], rtol=0, atol=0, equal_nan=True)


def test_tensors_share_memory_in_both_directions():
    batch = make()

    source = batch.to_tensordict()

    assert source["input_ids"].values().data_ptr() == batch["input_ids"].data_ptr()
    assert source["reward"].data_ptr() == batch["reward"].data_ptr()
    assert Batch.from_tensordict(source)["input_ids"].data_ptr() == batch["input_ids"].data_ptr()


def test_token_columns_have_common_offsets_and_rows_can_be_selected():
    source = make().to_tensordict()

    assert (source["hidden"].sum(-1) + source["input_ids"]).values().tolist() == [2, 7, 12, 17, 22, 27, 32]
    assert source["input_ids"][2].tolist() == [3, 4, 5]
    assert Batch.from_tensordict(source[2:])["input_ids"].tolist() == [3, 4, 5, 6, 7]
    assert Batch.from_tensordict(source[2:])["any"].tolist() == OBJECTS[2:]


@pytest.mark.parametrize(
    "batch",
    [make().take([]), make().select("reward"), Batch.of(lengths=[3, 4])],
    ids=["no rows", "no token column", "no column"],
)
def test_a_batch_without_rows_or_columns_keeps_its_lengths(batch):
    found = Batch.from_tensordict(batch.to_tensordict())

    assert found.lengths.tolist() == batch.lengths.tolist()
    assert sorted(found.columns) == sorted(batch.columns)


def strided(*lengths: int) -> torch.Tensor:
    return nested_tensor([torch.arange(length) for length in lengths])


def with_holes(*lengths: int) -> torch.Tensor:
    rows = torch.arange(5).repeat(len(lengths), 1)
    starts = torch.zeros(len(lengths), dtype=torch.int64)
    return torch.nested.narrow(rows, 1, starts, torch.tensor(lengths), layout=torch.jagged)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [jagged, strided, with_holes])
def test_nested_tensors_of_all_layouts_become_token_columns(layout):
    found = Batch.from_tensordict(TensorDict({"ids": layout(2, 3)}, batch_size=[2]))

    assert found.lengths.tolist() == [2, 3]
    assert found["ids"].tolist() == [0, 1, 0, 1, 2]


def test_one_value_for_the_whole_tensordict_becomes_one_per_row():
    source = TensorDict({"ids": jagged(2, 3)}, batch_size=[2])
    source["source"] = "gsm8k"

    assert Batch.from_tensordict(source)["source"].tolist() == ["gsm8k", "gsm8k"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (TensorDict({"x": torch.zeros(2, 3)}, batch_size=[2, 3]), r"batch_size like \[8\], got \[2, 3\]"),
        (
            TensorDict({"x": torch.zeros(2)}, batch_size=[2]),
            "no lengths\nAdd a nested tensor, or an entry 'num_tokens'",
        ),
        (TensorDict({"a": jagged(2, 3), "b": jagged(3, 2)}, batch_size=[2]), "'a' and 'b' have different numbers"),
        (TensorDict({"a": jagged(2, 3), "num_tokens": torch.tensor([2, 2])}, batch_size=[2]), "different numbers"),
        (TensorDict({"a": jagged(1), "b": {"c": torch.zeros(1)}}, batch_size=[1]), r"flatten_keys\('.'\)"),
        (
            TensorDict(
                {"a": nested_tensor_from_jagged(torch.zeros(5, 2), torch.tensor([0, 2, 5])).transpose(1, 2)},
                batch_size=[2],
            ),
            "'a' is not nested along its second dimension",
        ),
    ],
    ids=["two dimensions", "no lengths", "two lengths", "other num_tokens", "tree", "transposed"],
)
def test_what_is_no_batch_is_refused(source, words):
    with pytest.raises(ValueError, match=words):
        Batch.from_tensordict(source)
