"""Processes for tests of backends: results in order of rank, the first failure, the deadline."""

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlcore.errors import ModelError
from rlcore.models.load import check_same_files
from rlcore.testing import run_ranks
from rlcore.testing.waiting import HANG_S


def add_up(rank, world, directory, factor):
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)
    return [rank, float(total) * factor]


def fail_on_one(rank, world, directory):
    if rank == 1:
        raise RuntimeError("rank 1 has had enough")
    time.sleep(2 * HANG_S)


def sleep_for_ever(rank, world, directory):
    time.sleep(2 * HANG_S)


def compare_files(rank, world, directory, models):
    try:
        check_same_files(Path(models[rank]), torch.device("cpu"))
    except ModelError as error:
        return str(error)
    return None


def test_results_come_in_the_order_of_ranks(tmp_path):
    assert run_ranks(2, add_up, tmp_path, 10) == [[0, 30.0], [1, 30.0]]


def test_the_first_failure_ends_all_and_is_shown(tmp_path):
    with pytest.raises(AssertionError, match="rank 1 has had enough"):
        run_ranks(2, fail_on_one, tmp_path)


def test_ranks_that_do_not_end_are_ended(tmp_path):
    with pytest.raises(AssertionError, match=r"2 of 2 ranks did not end within 3\.0 s"):
        run_ranks(2, sleep_for_ever, tmp_path, timeout_s=3.0)


@pytest.mark.parametrize("place", [0, -1], ids=["the first byte", "the last"])
def test_ranks_that_read_different_files_are_refused(place, tmp_path):
    models = []
    for name in ("one", "two", "other"):
        model = tmp_path / name
        model.mkdir()
        (model / "config.json").write_text("{}")
        content = bytearray(1000)
        content[place] = 7 if name == "other" else 3
        (model / "model.safetensors").write_bytes(content)
        models.append(str(model))

    assert run_ranks(2, compare_files, tmp_path / "same", models[:2]) == [None, None]
    said = run_ranks(2, compare_files, tmp_path / "different", models[1:])
    assert [text.partition(" from ")[0] for text in said] == ["the ranks have read different weights"] * 2
