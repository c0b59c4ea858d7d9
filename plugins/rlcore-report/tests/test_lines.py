"""Files that are being written, damaged, or too large."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from rlcore_report.lines import read_lines


def numbered(count):
    return b"".join(b'{"step": %d, "x": "%s"}\n' % (step, b"x" * (step % 7)) for step in range(count))


@pytest.fixture
def file(tmp_path):
    def write(content):
        path = tmp_path / "metrics.jsonl"
        path.write_bytes(content)
        return path

    return write


def test_a_missing_file_has_no_rows(tmp_path):
    assert read_lines(tmp_path / "metrics.jsonl").rows == []


@pytest.mark.parametrize("end", [b'{"step": 3, "x', b'{"step": 3}', b'{"step": 3, "x": "\xc3'])
def test_an_incomplete_last_line_is_ignored(file, end):
    lines = read_lines(file(numbered(3) + end))

    assert [row["step"] for row in lines.rows] == [0, 1, 2]
    assert lines.notes == []


def test_damaged_lines_are_counted(file):
    lines = read_lines(file(numbered(2) + b'\x00\n[1]\n{"reward": 1}\n' + b'{"step": 9}\n'))

    assert [row["step"] for row in lines.rows] == [0, 1, 9]
    assert lines.notes == ["metrics.jsonl: left out 3 damaged lines"]


@pytest.mark.parametrize("end", [b"", b'{"step": 99999, "x'])
def test_a_large_file_is_sampled_with_its_first_and_last_line(file, end):
    lines = read_lines(file(numbered(50_000) + end), most_bytes=1000, most_lines=100)
    steps = [row["step"] for row in lines.rows]

    assert (steps[0], steps[-1]) == (0, 49_999)
    assert steps == sorted(set(steps))
    assert 90 <= len(steps) <= 100
    assert max(b - a for a, b in pairwise(steps)) < 1000
    assert "read 100 of about" in lines.notes[0] or "evenly spread" in lines.notes[0]


def test_a_gigabyte_is_read_without_holding_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with path.open("wb") as file:  # sparse: the middle takes no room on the disk
        file.write(json.dumps({"step": 1}).encode() + b"\n")
        file.seek(10**9)
        file.write(b'\n{"step": 2}\n')

    lines = read_lines(path, most_lines=20)

    assert [row["step"] for row in lines.rows] == [1, 2]
    assert lines.notes[0].startswith("metrics.jsonl has 1,000 MB")
