"""Recorded batches: complete round trips, reads of used columns only, and errors that name the damage."""

import errno
import json
import os
import re
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from rlcore.data.batch import Batch, object_array
from rlcore.data.recorded import open_batch, save_batch
from rlcore.errors import DataError, RunError

MESSAGES = [[{"role": "user", "content": "1 + 1?"}], "plain, with \ud800", None]


def make() -> Batch:
    return Batch.of(
        lengths=[2, 1, 3],
        tokens={"input_ids": [1, 2, 3, 4, 5, 6], "hidden": torch.arange(12.0).view(6, 2).bfloat16()},
        rows={"reward:a/b": [0.5, float("nan"), 2.0], "ok": [True, False, True], "messages": object_array(MESSAGES)},
    )


@pytest.fixture
def recorded(tmp_path) -> Path:
    save_batch(make(), tmp_path / "step")
    return tmp_path / "step"


def resident_bytes(file: Path) -> int:
    """Return the bytes of a mapped file that are in this process's memory."""
    blocks = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)
    return sum(1024 * int(re.search(r"^Rss: +(\d+)", it, re.M)[1]) for it in blocks if str(file) in it)


def test_a_round_trip_keeps_every_column(recorded):
    batch = make()

    found = open_batch(recorded)

    assert {name: found.level(name) for name in found.columns} == {name: batch.level(name) for name in batch.columns}
    assert found.lengths.tolist() == [2, 1, 3]
    assert found["messages"].tolist() == MESSAGES
    for name in ("input_ids", "hidden", "reward:a/b", "ok"):
        torch.testing.assert_close(found[name], batch[name], rtol=0, atol=0, equal_nan=True)
    assert found.take([2, 0]).merge(batch.take([2, 0]).select("input_ids"))["input_ids"].tolist() == [4, 5, 6, 1, 2]


@pytest.mark.parametrize(
    "batch", [make().take([]), make().select(), Batch.of(lengths=[])], ids=["rows", "columns", "any"]
)
def test_a_batch_without_rows_or_columns_comes_back(batch, tmp_path):
    save_batch(batch, tmp_path / "step")

    found = open_batch(tmp_path / "step")

    assert (found.lengths.tolist(), sorted(found.columns)) == (batch.lengths.tolist(), sorted(batch.columns))


def test_a_relative_directory_and_missing_parents_are_fine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    save_batch(make(), "runs/step")

    assert open_batch("runs/step")["input_ids"].tolist() == [1, 2, 3, 4, 5, 6]


def test_tensors_can_be_opened_as_a_tensordict(recorded):
    found = TensorDict.load_memmap(recorded / "tensors")

    assert found["tokens", "input_ids"].tolist() == [1, 2, 3, 4, 5, 6]
    assert found["rows", "num_tokens"].tolist() == [2, 1, 3]
    assert [file for file in recorded.rglob("*") if "pickle" in file.name] == []


def test_opening_reads_no_column_and_a_slice_reads_its_pages(tmp_path):
    size = 4_000_000
    save_batch(Batch.of(lengths=[size], tokens={"x": torch.arange(size)}), tmp_path / "step")
    file = tmp_path / "step" / "tensors" / "tokens" / "x.memmap"

    column = open_batch(tmp_path / "step")["x"]

    assert resident_bytes(file) == 0
    assert column[1_000_000:1_000_010].sum() == 10_000_045
    assert 0 < resident_bytes(file) < 1_000_000
    assert int(column.sum()) == size * (size - 1) // 2
    assert resident_bytes(file) == pytest.approx(8 * size, rel=0.01)


def test_objects_are_read_when_they_are_used(recorded):
    file = recorded / "objects" / "0.json"
    file.write_bytes(b"?" * file.stat().st_size)

    batch = open_batch(recorded)

    assert "messages" in batch
    assert batch.level("messages") == "object"
    assert batch.select("input_ids", "ok")["ok"].tolist() == [True, False, True]
    with pytest.raises(DataError, match=r"0\.json is damaged: .*\nRecord the batch again"):
        batch["messages"]


def test_a_change_in_place_does_not_reach_the_file(recorded):
    open_batch(recorded)["input_ids"].zero_()

    assert open_batch(recorded)["input_ids"].tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("value", "shown"),
    [((1, 2), r"\(1, 2\)"), ({1: 2}, r"\{1: 2\}"), ([float("nan")], r"\[nan\]"), ({"a": {1}}, r"\{'a': \{1\}\}")],
    ids=["tuple", "number as key", "NaN", "set"],
)
def test_an_object_that_json_would_change_is_refused(value, shown, tmp_path):
    batch = Batch.of(lengths=[1, 1], rows={"note": object_array(["fine", value])})

    with pytest.raises(DataError, match=rf"column 'note', row 1: JSON cannot represent {shown}\n.*drop\('note'\)"):
        save_batch(batch, tmp_path / "step")
    assert os.listdir(tmp_path) == []


def test_an_existing_directory_is_kept(recorded):
    with pytest.raises(DataError, match=r"step exists\n"):
        save_batch(make().take([0]), recorded)

    assert len(open_batch(recorded)) == 3


def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)

    with pytest.raises(RunError, match=r"step could not be written: .*No space left.*\nFree space"):
        save_batch(make(), tmp_path / "step")
    assert os.listdir(tmp_path) == []


def test_the_rest_of_a_killed_process_is_replaced(tmp_path):
    (tmp_path / ".step.writing" / "objects").mkdir(parents=True)
    (tmp_path / ".step.writing" / "objects" / "9.json").write_text("[")

    save_batch(make(), tmp_path / "step")

    assert os.listdir(tmp_path) == ["step"]
    assert not (tmp_path / "step" / "objects" / "9.json").exists()


def truncated(directory: Path) -> None:
    os.truncate(directory / "tensors" / "tokens" / "hidden.memmap", 23)


def without_a_column(directory: Path) -> None:
    (directory / "tensors" / "tokens" / "input_ids.memmap").unlink()


def without_its_description(directory: Path) -> None:
    (directory / "batch.json").unlink()


def half_described(directory: Path) -> None:
    os.truncate(directory / "batch.json", 40)


def described(**changes):
    """Return a function that replaces entries of batch.json."""

    def damage(directory: Path) -> None:
        about = json.loads((directory / "batch.json").read_text())
        (directory / "batch.json").write_text(json.dumps(about | changes))

    return damage


def column(name, /, **changes):
    """Return a function that replaces entries of one column in batch.json."""

    def damage(directory: Path) -> None:
        about = json.loads((directory / "batch.json").read_text())
        next(it for it in about["columns"] if it["name"] == name).update(changes)
        (directory / "batch.json").write_text(json.dumps(about))

    return damage


def elsewhere(file):
    """Return a function that adds a file of another directory to the list, with its size."""

    def damage(directory: Path) -> None:
        (directory.parent / "secret.json").write_text("[1, 2, 3]")
        about = json.loads((directory / "batch.json").read_text())
        described(files=about["files"] | {file: (directory / file).stat().st_size})(directory)
        column("messages", file=file)(directory)

    return damage


def contents(text):
    """Return a function that replaces batch.json."""
    return lambda directory: (directory / "batch.json").write_text(text)


def lengths(*values, dtype=torch.int64):
    """Return a function that overwrites the lengths."""

    def damage(directory: Path) -> None:
        (directory / "tensors/rows/num_tokens.memmap").write_bytes(torch.tensor(values, dtype=dtype).numpy().tobytes())

    return damage


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (truncated, "is damaged: tensors/tokens/hidden.memmap has 23 of its 24 bytes"),
        (without_a_column, "is damaged: tensors/tokens/input_ids.memmap is missing"),
        (without_its_description, "is not a recorded batch: .*No such file"),
        (half_described, "is not a recorded batch: "),
        (contents("[" * 100_000), "is not a recorded batch: "),
        (contents("[1]"), "has format None, this version reads 1"),
        (described(format=2), "has format 2, this version reads 1"),
        (described(rows=4), "column 'reward:a/b' has 3 values for 4 rows"),
        (described(tokens=7), "column 'input_ids' has 6 values for 7 tokens"),
        (described(columns=None), "batch.json is broken: TypeError"),
        (described(columns=[]), "batch.json is broken: KeyError: 'num_tokens'"),
        (described(columns=[{"name": "ok"}]), "batch.json is broken: KeyError: 'level'"),
        (described(files=[]), "batch.json is broken: AttributeError"),
        (described(files={"batch.json\0": 1}), "is damaged: batch.json\0 is missing"),
        (column("ok", name="input_ids"), "there are two columns 'input_ids'"),
        (column("ok", name="messages"), "there are two columns 'messages'"),
        (column("ok", level="cell"), "batch.json is broken: KeyError: 'cell"),
        (column("ok", dtype="load"), "column 'ok' has type 'load'"),
        (column("ok", dtype="float64"), r"column 'ok' of shape \[3\] does not fit its 3 bytes"),
        (column("hidden", shape=[6, 2, 1000]), "column 'hidden' of shape .* does not fit its 24 bytes"),
        (column("hidden", shape=[-6, -2]), r"column 'hidden' has type 'bfloat16' and shape \[-6, -2\]"),
        (column("hidden", shape=[6.0, 2.0]), "column 'hidden' has type 'bfloat16' and shape"),
        (column("hidden", shape=[]), "column 'hidden' of shape"),
        (elsewhere("../secret.json"), r"column 'messages' is not in one of its files, but in \.\./secret"),
        (elsewhere("/etc/hostname"), "column 'messages' is not in one of its files, but in /etc/hostname"),
        (column("messages", file="objects/1.json"), "column 'messages' is not in one of its files"),
        (column("num_tokens", dtype="float64"), "'num_tokens' are not lengths"),
        (lengths(2, 1, 2), "its lengths sum to 5, but it has 6 tokens"),
        (lengths(3, -1, 4), "'num_tokens' are not lengths"),
    ],
)
def test_damage_is_named(recorded, damage, words):
    damage(recorded)

    with pytest.raises(DataError, match=rf"{words}.*\n\w.*[.:)]$"):
        open_batch(recorded)


@pytest.mark.parametrize("text", ["[" * 100_000, "{}", "[1, 2]", "[1"], ids=["deep", "object", "short", "half"])
def test_damaged_objects_are_named(recorded, text):
    (recorded / "objects/0.json").write_text(text)
    about = json.loads((recorded / "batch.json").read_text())
    described(files=about["files"] | {"objects/0.json": len(text)})(recorded)

    with pytest.raises(DataError, match=r"0\.json is damaged: .*\nRecord the batch again"):
        open_batch(recorded)["messages"]


def test_everything_is_on_the_disk_before_the_directory_has_its_name(tmp_path, monkeypatch):
    events = []
    real_sync, real_rename = os.fsync, Path.rename

    def sync(descriptor):
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real_sync(descriptor)

    def rename(path, target):
        inside = {str(it) for it in (*path.rglob("*"), path)}
        assert inside <= set(events), "renamed before its files were on the disk"
        events.append("renamed")
        return real_rename(path, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "rename", rename)

    save_batch(make(), tmp_path / "step")

    assert events[-2:] == ["renamed", str(tmp_path)]
