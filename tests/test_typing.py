"""The types that a plugin author sees: completion and mypy work inside `collect` and `update`."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlcore.testing.waiting import HANG_S

FOLDER = Path(__file__).parent / "typing"
_EXPECTED = re.compile(r"# error: ([a-z-]+)$")
_REPORTED = re.compile(r"^\S+?:(\d+): error: .* \[([a-z-]+)\]$", re.M)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_mypy_reports_the_marked_lines_and_no_others(path):
    lines = enumerate(path.read_text().splitlines(), start=1)
    expected = {(number, found[1]) for number, line in lines if (found := _EXPECTED.search(line))}
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent"]

    finished = subprocess.run(
        [*command, str(path)], cwd=FOLDER.parents[1], capture_output=True, text=True, timeout=HANG_S, check=False
    )

    reported = {(int(number), code) for number, code in _REPORTED.findall(finished.stdout)}
    assert reported == expected, finished.stdout + finished.stderr
