"""Execution of the Python code in a response against tests.

A column of the data holds the tests of a row, in one of two forms:
    a text or a list of texts         code that runs after the response and raises if it is wrong: "assert f(2) == 4"
    a list of {input, output}         stdin of the program, and the output it must print before it exits with 0
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlcore.errors import ConfigError, InfrastructureError, SampleError, require, require_at_least
from rlcore.protocols.reward import RewardResult
from rlcore_rewards import sandbox

_log = logging.getLogger(__name__)
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_GRACE_S = 10.0
_TEST = """\
import os as _os; _os.unlink(__file__)
exec(compile(open({answer!r}, encoding="utf-8").read(), {answer!r}, "exec"))
exec(compile({tail!r}, "tests", "exec"))
print({word!r}, end="", flush=True)
"""
"""Test program. It deletes its own file before the response runs, which has a separate file so that it may begin
with any statement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonConfig:
    """Options of `python`."""

    column: str = "tests"
    """Column with the tests."""
    timeout_s: float = 5.0
    """Wall-clock time of one test; reward.timeout_s must be longer than all tests of a row together."""
    cpu_s: int = 5
    """CPU time of each process of a test."""
    memory_mb: int = 512
    """Address space of each process, and resident memory of all processes of a test together."""
    processes: int = 32
    """Maximum number of concurrent processes of a test."""
    file_mb: int = 16
    """Size of the largest file that a program may write, including its output."""
    score: Literal["all", "share"] = "all"
    """all: 1 if every test passes, else 0; share: fraction of tests that pass."""

    def __post_init__(self) -> None:
        require(self.timeout_s > 0, "timeout_s", "more than 0", self.timeout_s, 5.0)
        require_at_least(self, cpu_s=1, memory_mb=64, processes=1, file_mb=1)
        require(self.score in ("all", "share"), "score", "all or share", self.score, "all")


class Python:
    """1 if the last code block of the response passes all tests in time, else 0.

    Example: rlcore train reward=python data.train=problems.jsonl reward.timeout_s=60 reward.num_processes=8
    """

    Config = PythonConfig

    def __init__(self, config: PythonConfig) -> None:
        if reason := sandbox.supported():
            raise ConfigError(f"reward 'python' cannot run code on this machine: {reason}\nUse reward=remote instead.")
        for feature in sandbox.missing():
            _log.warning("reward python: this machine has no %s", feature)
        self._config = config
        self.required_columns = (config.column,)

    def __call__(self, completion: str, **columns: Any) -> RewardResult:
        cases = _cases(columns[self._config.column], self._config.column)
        code = extract(completion)
        ends = []
        for tail, given, wanted in cases if code is not None else []:
            ends.append(self._run(code or "", tail, given, wanted))
            if ends[-1] != "passed" and self._config.score == "all":
                break
        passed = ends.count("passed")
        value = passed / len(cases) if self._config.score == "share" else float(passed == len(cases))
        ended = {"timeouts": float(ends.count("late")), "overruns": float(ends.count("over"))}
        return RewardResult(value, metrics={"has_code": float(code is not None), **ended})

    def _run(self, code: str, tail: str, given: str, wanted: str | None) -> Literal["passed", "failed", "late", "over"]:
        """Run one test and return its outcome; "over" if it exceeded the limit of processes or memory."""
        word = secrets.token_hex(16)  # printed after the test code, so that an early exit does not pass
        home = Path(tempfile.mkdtemp(prefix="rlcore-python-"))
        try:
            (home / "answer.py").write_text(code, encoding="utf-8", errors="replace")
            test = _TEST.format(answer=str(home / "answer.py"), tail=tail, word=word)
            (home / "test.py").write_text(test, encoding="utf-8", errors="replace")
            program = home / ("answer.py" if wanted is not None else "test.py")
            with tempfile.TemporaryFile() as read, tempfile.TemporaryFile() as written:  # unnamed files
                read.write(given.encode(errors="replace"))
                read.seek(0)
                end = self._launch(home, program, read.fileno(), written.fileno())
                written.seek(0)
                printed = written.read(self._config.file_mb * 2**20).decode(errors="replace")
        finally:
            _remove(home)
        if end["failed"]:
            raise InfrastructureError(
                f"the sandbox cannot start a program: {end['failed']}\nUse reward=remote instead."
            )
        if end["late"] or end["over"]:
            return "late" if end["late"] else "over"
        if wanted is None:
            return "passed" if printed.endswith(word) else "failed"
        return "passed" if end["status"] == 0 and _lines(printed) == _lines(wanted) else "failed"

    def _launch(self, home: Path, program: Path, read: int, written: int) -> dict[str, Any]:
        """Run a program in its directory, with files as its stdin and stdout."""
        config = self._config
        spec = {
            "program": str(program),
            "input": read,
            "output": written,
            "wall_s": config.timeout_s,
            "cpu_s": config.cpu_s,
            "memory_bytes": config.memory_mb * 2**20,
            "processes": config.processes,
            "file_bytes": config.file_mb * 2**20,
            "variables": {"PATH": os.defpath, "HOME": str(home), "TMPDIR": str(home), "LANG": "C.UTF-8"},
            "parent": os.getpid(),
        }
        launcher = subprocess.Popen(
            [sys.executable, "-I", "-S", sandbox.__file__, json.dumps(spec)],
            cwd=home,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(read, written),
            start_new_session=True,
        )
        try:
            report, errors = launcher.communicate(timeout=config.timeout_s + _GRACE_S)
        except subprocess.TimeoutExpired as error:
            os.killpg(launcher.pid, 9)
            launcher.communicate()
            raise InfrastructureError(
                "the sandbox does not respond\nCheck whether this machine is overloaded."
            ) from error
        if not report:
            raise InfrastructureError(
                f"the sandbox failed: {errors.decode(errors='replace')[-200:]}\nUse reward=remote instead."
            )
        return dict(json.loads(report))


def extract(completion: str) -> str | None:
    """Return the last code block, or the whole completion if it has no block and compiles, or None."""
    blocks: list[str] = _BLOCK.findall(completion)
    if blocks:
        return blocks[-1]
    try:
        compile(completion, "answer", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return completion if completion.strip() else None


def _remove(home: Path) -> None:
    """Remove the directory of a program, with all files that it left."""
    try:
        shutil.rmtree(home, ignore_errors=True)
    except RecursionError:  # deeply nested directories
        subprocess.run(["rm", "-rf", "--", str(home)], check=False, timeout=60)


def _cases(tests: Any, column: str) -> list[tuple[str, str, str | None]]:
    """Return (code to run after the response, stdin, expected output or None) for each test."""
    items = tests if isinstance(tests, Sequence) and not isinstance(tests, str) else [tests]
    cases: list[tuple[str, str, str | None]] = []
    for item in items:
        if isinstance(item, str):
            cases.append((item, "", None))
        elif isinstance(item, Mapping) and "output" in item:
            cases.append(("", str(item.get("input", "")), str(item["output"])))
        else:
            raise SampleError(f"column {column!r} holds {item!r:.60}, which is neither code nor {{input, output}}")
    if not cases:
        raise SampleError(f"column {column!r} holds no tests")
    return cases


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
