"""Tests wait as long as HANG_S and measure no time, so that they pass on a busy machine."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlcore.testing import waiting
from rlcore.testing.waiting import wait_until

ROOT = Path(__file__).parents[1]
FILES = sorted({*ROOT.glob("tests/*.py"), *ROOT.glob("plugins/*/tests/*.py"), *ROOT.glob("rlcore/testing/*.py")})
WAITS = {"communicate", "join", "settimeout", "wait", "wait_for"}
CLOCKS = {"monotonic", "perf_counter", "time"}


def is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def name_of(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def reads_clock(node: ast.AST) -> bool:
    return any(isinstance(inner, ast.Call) and name_of(inner) in CLOCKS for inner in ast.walk(node))


def literal_deadlines(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the numbers that a wait is given, and those that elapsed time is compared with."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            given = [keyword.value for keyword in node.keywords if keyword.arg == "timeout"]
            given += node.args[-1:] if name_of(node) in WAITS else []
            yield from filter(is_number, given)
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Lt | ast.LtE) and reads_clock(node.left):
            yield from filter(is_number, node.comparators)


@pytest.mark.parametrize(
    "code",
    ["run(c, timeout=60)", "process.wait(10)", "asyncio.wait_for(x(), 5)", "assert time.monotonic() - began < 2"],
)
def test_literal_deadlines_are_found(code):
    assert len([*literal_deadlines(ast.parse(code))]) == 1


@pytest.mark.parametrize(
    "code",
    ["run(c, timeout=HANG_S)", "', '.join(words)", "assert clock.monotonic() - began >= 2", "make(timeout_s=0.3)"],
)
def test_deadlines_with_a_name_and_settings_under_test_are_left_alone(code):
    assert [*literal_deadlines(ast.parse(code))] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_file_has_no_literal_deadline(path):
    lines = [node.lineno for node in literal_deadlines(ast.parse(path.read_text()))]

    assert lines == [], "wait with rlcore.testing.waiting.HANG_S, and compare no elapsed time"


def test_waiting_ends_when_the_condition_is_true():
    answers = iter([False, [], "yes"])

    wait_until(lambda: next(answers))

    assert [*answers] == []


def test_waiting_for_what_never_happens_fails(monkeypatch):
    monkeypatch.setattr(waiting, "HANG_S", 0.1)

    with pytest.raises(AssertionError, match=r"not true within 0\.1 s"):
        wait_until(lambda: False)
