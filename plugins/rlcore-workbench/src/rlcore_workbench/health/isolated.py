"""Checks in a separate process: `run_jobs` runs in the parent, `main` in the child."""

from __future__ import annotations

import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

from rlcore.errors import RlcoreError
from rlcore_workbench.health.machine import CHECKS, Fault, Remark
from rlcore_workbench.health.settings import check_settings
from rlcore_workbench.process import Child, open_messages


def run_jobs(
    jobs: Sequence[tuple[str, str, str]],
    timeout_s: float,
    output: str,
    settings: Sequence[str] = (),
    is_over: Callable[[], bool] = bool,
) -> tuple[list[dict[str, Any]], str, str]:
    """Run jobs (kind, name, package) in one child; return its answers, the reason for missing ones, and its output."""
    with tempfile.TemporaryFile("w+", errors="replace") as printed:
        with Child(__name__, output, json.dumps(jobs), *settings, printed=printed) as child:
            answers = list(islice(child.messages(timeout_s, is_over=is_over), len(jobs)))
        printed.seek(0)
        return answers, child.reason, printed.read()


def main(output: str, jobs: str, *settings: str) -> None:
    """Run the jobs [kind, name, package] and report an answer for each."""
    say = open_messages()
    for kind, name, package in json.loads(jobs):
        began = time.monotonic()
        if kind in ("machine", "settings"):
            check = CHECKS[name] if kind == "machine" else partial(check_settings, name, settings)
        else:
            check = partial(_plugin, kind, name, package)
        say(**_answer(check, output), seconds=round(time.monotonic() - began, 3))


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
        return _config(package)
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


def _config(package: str) -> str:
    """Check that a package has YAML files in conf/, without importing it."""
    from rlcore.config.compose import conf_directories

    directory = conf_directories().get(package)
    found = list(directory.rglob("*.yaml")) if directory else []
    if not found:
        raise Fault(f"there is no conf/ with YAML files in {package}", f"pip install -U {package}")
    return f"{len(found)} files"


if __name__ == "__main__":
    main(*sys.argv[1:])
