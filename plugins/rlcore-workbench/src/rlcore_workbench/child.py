"""Child process of `rlcore check`: resolves the plugin, runs pytest, and writes JSON lines to stdout.

{"event": "plugin", "text": "reward gsm8k (rlcore 0.1.0, rlcore.rewards.match:GSM8K)"}
{"event": "start", "test": "any completion gets a score"}
{"event": "test", "test": …, "outcome": "passed" | "failed" | "skipped", "seconds": …, "reason": …, "details": …}
{"event": "unchecked", "text": …}    {"event": "error", "text": …}    {"event": "end"}
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from rlcore.errors import UserError
from rlcore_workbench import suites
from rlcore_workbench.process import open_messages

_TEST_FILE = "from rlcore_workbench import suites\n\nTestPlugin = suites.chosen()\n"


def main(text: str) -> int:
    """Run the suite of a spec from check.py."""
    say = open_messages()
    sys.path.insert(0, os.getcwd())  # find project code, as `rlcore train` does
    spec = json.loads(text)
    try:
        suite = suites.choose(spec)
    except UserError as error:
        say(event="error", text=str(error))
        return 2
    say(event="plugin", text=suite.title)
    for what in suite.unchecked:
        say(event="unchecked", text=what)
    with tempfile.TemporaryDirectory(prefix="rlcore-check-") as directory:
        file = Path(directory) / "test_contract.py"
        file.write_text(_TEST_FILE)
        (Path(directory) / "pytest.ini").write_text("[pytest]\n")
        arguments = [str(file), "-q", "--rootdir", directory, "-c", f"{directory}/pytest.ini", "-p", "no:cacheprovider"]
        code = pytest.main([*arguments, "--basetemp", f"{directory}/tmp"], plugins=[Reporter(say, spec["skip"])])
    say(event="end")
    return int(code)


class Reporter:
    """Pytest plugin that reports each test when it ends."""

    def __init__(self, say: Callable[..., None], skip: list[str]) -> None:
        self._say, self._skip = say, skip

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in list(items):
            words = [word for word in self._skip if word in readable(item.nodeid)]
            if words:
                items.remove(item)
                self._say(event="unchecked", text=f"{readable(item.nodeid)}: skipped by --skip {words[0]!r}")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._say(event="start", test=readable(nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        self._say(
            event="test",
            test=readable(report.nodeid) + ("" if report.when == "call" else f" ({report.when})"),
            outcome=report.outcome,
            seconds=report.duration,
            reason=reason(report),
            details=report.longreprtext,
        )

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome == "failed":
            text = report.longreprtext
            self._say(event="test", test="setup", outcome="failed", seconds=0.0, reason=text, details=text)


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
