"""Checks in a separate process: `run_jobs` runs in the parent, `main` in the child.

The child appends one line of JSON per check to a file, so that its output or a crash cannot corrupt the results.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rlcore.errors import RlcoreError
from rlcore_workbench.health.machine import CHECKS, Fault, Remark
from rlcore_workbench.health.settings import check_settings

_CHILD = ("-P", "-X", "faulthandler", "-m", "rlcore_workbench.health.isolated")


def run_jobs(
    jobs: Sequence[tuple[str, str, str]],
    timeout_s: float,
    output: str,
    settings: Sequence[str] = (),
    is_over: Callable[[], bool] = bool,
) -> tuple[list[dict[str, Any]], str, str]:
    """Run jobs (kind, name, package) in one child; return its answers, the reason for missing ones, and its output."""
    with tempfile.TemporaryDirectory(prefix="rlcore-doctor-") as folder:
        answers, printed = Path(folder, "answers"), Path(folder, "printed")
        answers.touch()
        command = [sys.executable, *_CHILD, str(answers), output]
        with printed.open("wb") as sink:
            child = subprocess.Popen(
                [*command, json.dumps(jobs), *settings],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
            try:
                reason = _wait(child, lambda: answers.read_text().count("\n"), len(jobs), timeout_s, is_over)
            finally:
                _kill_group(child)
        lines = answers.read_text().splitlines(keepends=True)
        text = printed.read_text(errors="replace")
    return [json.loads(line) for line in lines if line.endswith("\n")], reason, text


def _wait(
    child: subprocess.Popen[bytes],
    progress: Callable[[], int],
    number: int,
    timeout_s: float,
    is_over: Callable[[], bool],
) -> str:
    """Wait until all answers are there or no more can follow; return the reason why some are missing."""
    seen, since = 0, time.monotonic()
    while child.poll() is None:
        if progress() != seen:
            seen, since = progress(), time.monotonic()
        if seen == number:
            return ""
        if time.monotonic() - since > timeout_s:
            return f"no answer in {timeout_s:g} s"
        if is_over():
            return "interrupted"
        time.sleep(0.02)
    if child.returncode < 0:
        return f"the process was ended by {signal.Signals(-child.returncode).name}"
    return f"the process ended with exit code {child.returncode} without an answer"


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    """Kill the child and all processes that it started."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        child.wait(timeout=10)


def main(answers: str, output: str, jobs: str, *settings: str) -> None:
    """Run the jobs [kind, name, package] and append an answer for each to a file."""
    for kind, name, package in json.loads(jobs):
        began = time.monotonic()
        if kind in ("machine", "settings"):
            check = CHECKS[name] if kind == "machine" else partial(check_settings, name, settings)
        else:
            check = partial(_plugin, kind, name, package)
        answer = _answer(check, output)
        answer["seconds"] = round(time.monotonic() - began, 3)
        with Path(answers).open("a") as file:
            file.write(json.dumps(answer) + "\n")


def _answer(check: Callable[[str], str], output: str) -> dict[str, Any]:
    try:
        return {"status": "ok", "detail": check(output)}
    except Remark as remark:
        return {"status": remark.status, "detail": str(remark), "fix": remark.fix}
    except BaseException as error:  # a plugin may raise anything, and the next one must still be checked
        text = str(error) if isinstance(error, RlcoreError) else f"{type(error).__name__}: {error}"
        return {"status": "broken", "detail": text, "traceback": traceback.format_exc()}


def _plugin(kind: str, name: str, package: str, _: str) -> str:
    """Import a plugin and check its protocol; also register hooks and run their health checks."""
    reference = f"{name}@{package}"
    if kind == "config":
        return _config(name, package)
    if kind != "hooks":
        from rlcore.registry import resolve

        resolve(kind, reference)
        return ""
    from rlcore.hooks import Hooks

    return "; ".join(f"{it.name}: {_health(it.name, it.run, it.fix)}" for it in Hooks([reference]).health_checks())


def _health(name: str, run: Callable[[], str], fix: str) -> str:
    try:
        return run()
    except Exception as error:
        raise Fault(f"{name}: {type(error).__name__}: {error}", fix) from error


def _config(name: str, package: str) -> str:
    """Check that a package has YAML files in conf/, without importing it."""
    from importlib.util import find_spec

    from rlcore.registry import catalog

    entry = next(entry for entry in catalog().find("config", name) if entry.package == package)
    top, *rest = entry.target.split(".")
    spec = find_spec(top)
    places = [Path(place, *rest, "conf") for place in (spec and spec.submodule_search_locations) or ()]
    found = [file for place in places for file in place.rglob("*.yaml")]
    if not found:
        raise Fault(f"there is no conf/ with YAML files in {entry.target}", f"pip install -U {package}")
    return f"{len(found)} files"


if __name__ == "__main__":
    main(*sys.argv[1:])
