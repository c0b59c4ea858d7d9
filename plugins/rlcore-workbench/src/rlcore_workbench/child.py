"""Child process of `rlcore check`: resolves the plugin, runs pytest, and writes JSON lines to stdout.

{"is": "plugin", "text": "reward gsm8k (rlcore 0.1.0, rlcore.rewards.match:GSM8K)"}
{"is": "start", "test": "any completion gets a score"}
{"is": "test", "test": …, "outcome": "passed" | "failed" | "skipped", "seconds": …, "reason": …, "details": …}
{"is": "unchecked", "text": …}    {"is": "error", "text": …}    {"is": "end"}
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, TextIO

import pytest

from rlcore.errors import UserError
from rlcore_workbench import suites

_TEST_FILE = "from rlcore_workbench import suites\n\nTestPlugin = suites.chosen()\n"


def main(text: str) -> int:
    """Run the suite of a spec from check.py."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # keep output of the plugin out of the report
    sys.path.insert(0, os.getcwd())  # find project code, as `rlcore train` does
    spec = json.loads(text)
    try:
        suite = suites.choose(spec)
    except UserError as error:
        say(out, "error", text=str(error))
        return 2
    say(out, "plugin", text=suite.title)
    for what in suite.unchecked:
        say(out, "unchecked", text=what)
    with tempfile.TemporaryDirectory(prefix="rlcore-check-") as directory:
        file = Path(directory) / "test_contract.py"
        file.write_text(_TEST_FILE)
        (Path(directory) / "pytest.ini").write_text("[pytest]\n")
        arguments = [str(file), "-q", "--rootdir", directory, "-c", f"{directory}/pytest.ini", "-p", "no:cacheprovider"]
        code = pytest.main([*arguments, "--basetemp", f"{directory}/tmp"], plugins=[Reporter(out, spec["skip"])])
    say(out, "end")
    return int(code)


def say(out: TextIO, what: str, **values: Any) -> None:
    """Write one message."""
    out.write(json.dumps({"is": what, **values}) + "\n")
    out.flush()


class Reporter:
    """Pytest plugin that reports each test when it ends."""

    def __init__(self, out: TextIO, skip: list[str]) -> None:
        self._out, self._skip = out, skip

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in list(items):
            words = [word for word in self._skip if word in readable(item.nodeid)]
            if words:
                items.remove(item)
                say(self._out, "unchecked", text=f"{readable(item.nodeid)}: left out by --skip {words[0]!r}")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        say(self._out, "start", test=readable(nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        say(
            self._out,
            "test",
            test=readable(report.nodeid) + ("" if report.when == "call" else f" ({report.when})"),
            outcome=report.outcome,
            seconds=report.duration,
            reason=reason(report),
            details=report.longreprtext,
        )

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome == "failed":
            text = report.longreprtext
            say(self._out, "test", test="setup", outcome="failed", seconds=0.0, reason=text, details=text)


def readable(nodeid: str) -> str:
    """Return the name of a test in words: test_x.py::TestPlugin::test_any_completion_is_scored -> any completion is scored."""
    return nodeid.rpartition("::")[2].removeprefix("test_").replace("_", " ")


def reason(report: pytest.TestReport) -> str:
    """Return the message of the assertion, or the exception and its place."""
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        return report.longreprtext
    message = str(crash.message)
    if message.startswith("AssertionError: "):
        return message.removeprefix("AssertionError: ")
    return f"{message}\nat {crash.path}:{crash.lineno}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
