"""`rlcore doctor`: check this machine, the settings of a run, and that every plugin loads.

All checks run in child processes (health/isolated.py), one child per package. If it crashes or a check exceeds its
deadline, that check is reported as broken and a new child continues with the next.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

from rlcore.cli import make_parser
from rlcore.cli.list_plugins import Row, list_plugins
from rlcore.errors import ConfigError, did_you_mean
from rlcore.registry import catalog
from rlcore.registry.catalog import normalize
from rlcore_workbench.health import machine
from rlcore_workbench.health.isolated import run_jobs

SETTINGS = ("settings", "model", "tokenizer", "data", "reward", "plan")
"""The checks of health/settings.py."""
_AT_ONCE = min(4, os.cpu_count() or 1)
"""Number of packages that are checked at the same time."""
SLOW_S = 10.0
"""Import time, including dependencies, above which a plugin is reported as slow."""
_EXAMPLES = """\
examples:
  rlcore doctor                          this machine
  rlcore doctor --plugins                also every installed plugin
  rlcore doctor model.path=DIR data.train=train.jsonl reward=gsm8k
  rlcore doctor rlcore-vllm              the plugins of one package, with tracebacks
  rlcore doctor --plugins --json | jq '.[] | select(.status == "broken")'
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Result of one check, and one object of --json; keys may be added but not removed."""

    kind: str
    """machine, settings, or a plugin kind."""
    name: str
    package: str = ""
    version: str = ""
    target: str = ""
    status: str = "ok"
    """ok, slow, warning, disabled or broken."""
    detail: str = ""
    fix: str = ""
    """The command to type."""
    seconds: float = 0.0
    traceback: str = ""


def main(argv: Sequence[str]) -> int:
    """Run the command and return exit code 1 if anything is broken."""
    options = _parser().parse_intermixed_args(list(argv))
    settings = [word for word in options.words if "=" in word]
    packages = [word for word in options.words if "=" not in word]
    alone = [] if packages else [[Finding(kind="machine", name=name) for name in machine.CHECKS]]
    alone += [[Finding(kind="settings", name=name) for name in SETTINGS]] if settings else []
    plugins = plugin_checks(packages) if options.plugins or packages else []
    width = max(len(_title(check)) for checks in (*alone, *plugins) for check in checks)
    findings: list[Finding] = []
    check = partial(check_all, timeout_s=options.timeout, output=options.output, settings=settings)
    for batches, at_once in ((alone, 1), (plugins, _AT_ONCE)):
        with closing(side_by_side(batches, check, at_once)) as results:
            for finding in results:
                findings.append(finding)
                if not options.json:
                    print("\n".join(_lines(finding, width, traceback=bool(packages))), flush=True)
    if options.json:
        print(json.dumps([asdict(finding) for finding in sorted(findings, key=_place)], indent=2))
    else:
        print(_summary(findings))
    return int(any(finding.status == "broken" for finding in findings))


def side_by_side(
    batches: Sequence[Sequence[Finding]], check: Callable[..., list[Finding]], at_once: int
) -> Generator[Finding, None, None]:
    """Yield the findings of each batch when it is finished; closing the iterator ends the child processes."""
    stop = threading.Event()
    with ThreadPoolExecutor(at_once) as pool:
        try:
            for done in as_completed([pool.submit(check, checks, is_over=stop.is_set) for checks in batches]):
                yield from done.result()
        finally:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)


def plugin_checks(wanted: Sequence[str]) -> list[list[Finding]]:
    """Return the checks of every installed plugin, or of the wanted packages only, by package."""
    rows = list_plugins(catalog(), absent=False)
    for word in wanted:
        names = sorted({name for row in rows for name in (row.package, row.name)})
        if word not in names and normalize(word) not in names:
            raise ConfigError(
                f"no plugin or package '{word}' is installed.{did_you_mean(word, names)}\nType  rlcore list-plugins"
            )
    chosen = [row for row in rows if not wanted or {row.name, row.package} & {*wanted, *map(normalize, wanted)}]
    by_package = groupby(sorted(chosen, key=lambda row: row.package), key=lambda row: row.package)
    return [[_unchecked(row) for row in group] for _, group in by_package]


def check_all(
    checks: Sequence[Finding],
    timeout_s: float,
    output: str,
    settings: Sequence[str] = (),
    is_over: Callable[[], bool] = bool,
) -> list[Finding]:
    """Run the checks in child processes and return the completed findings."""
    subject = checks[0].package or f"the {checks[0].kind}"
    print(f"checking {subject}: {', '.join(_name(check) for check in checks)} ...", file=sys.stderr, flush=True)
    found = [finding for finding in checks if finding.status in ("disabled", "broken")]
    left = [finding for finding in checks if finding not in found]
    while left and not is_over():
        jobs = [(it.kind, it.name, it.package) for it in left]
        answers, reason, printed = run_jobs(jobs, timeout_s, output, settings, is_over)
        found += [_completed(finding, answer) for finding, answer in zip(left, answers)]
        left = left[len(answers) :]
        if left:
            found.append(_failed(left.pop(0), reason, printed, timeout_s))
    return found


def _unchecked(row: Row) -> Finding:
    """Return the finding of a plugin before its check, with what the metadata already shows."""
    finding = Finding(kind=row.kind, name=row.name, package=row.package, version=row.version, target=row.target)
    if row.status == "broken":
        return replace(finding, status="broken", detail=row.detail, fix=f"pip install -U {row.package}")
    if row.status == "disabled":
        return replace(finding, status="disabled", detail=row.detail)
    remark = row.status in ("unbounded", "duplicate", "shadowed")
    return replace(finding, status="warning", detail=f"{row.status}: {row.detail}") if remark else finding


def _failed(finding: Finding, reason: str, printed: str, timeout_s: float) -> Finding:
    """Return the finding of a check that crashed its process or never finished."""
    fix = f"rlcore doctor {finding.package} --timeout {timeout_s * 4:g}".replace("  ", " ")
    if "no answer in" not in reason:
        fix = f"pip install --force-reinstall {finding.package}" if finding.package else ""
    return replace(finding, status="broken", detail=reason, fix=fix, traceback=printed[-4000:])


def _completed(finding: Finding, answer: Mapping[str, Any]) -> Finding:
    """Return the finding of a finished check; keep what the metadata already shows unless there is a worse problem."""
    if answer["status"] == "ok" and finding.package and answer["seconds"] > SLOW_S:
        fix = f"python -X importtime -c 'import {finding.target.partition(':')[0]}'"
        return replace(finding, status="slow", detail=f"loads in {answer['seconds']:.1f} s", fix=fix)
    if answer["status"] == "ok" and finding.status == "warning":
        return replace(finding, seconds=answer["seconds"])
    return replace(finding, **answer)


def _lines(finding: Finding, width: int, *, traceback: bool) -> list[str]:
    first, *rest = finding.detail.splitlines() or [""]
    lines = [f"{finding.status:<8}  {_title(finding):<{width}}  {first}".rstrip()]
    lines += [f"{'':<10}{line}" for line in rest]
    if finding.fix:
        lines.append(f"{'':<10}to type:  {finding.fix}")
    if traceback and finding.traceback:
        lines += ["", *(f"    {line}" for line in finding.traceback.splitlines()), ""]
    return lines


def _summary(findings: Sequence[Finding]) -> str:
    counts = {status: sum(it.status == status for it in findings) for status in ("broken", "slow", "warning")}
    bad = ", ".join(f"{number} {status}" for status, number in counts.items() if number)
    return f"{len(findings)} checks: {bad or 'all ok'}"


def _place(finding: Finding) -> tuple[str, ...]:
    """Return the sort key: first the checks of machine and settings, then plugins by kind and name."""
    return (finding.kind, finding.name, finding.package) if finding.package else ()


def _name(finding: Finding) -> str:
    return f"{finding.kind} {finding.name}" if finding.package else finding.name


def _title(finding: Finding) -> str:
    return f"{_name(finding)} ({finding.package} {finding.version})" if finding.package else finding.name


def _parser() -> argparse.ArgumentParser:
    description = "Check this machine, and that plugins load and meet their protocol, in processes with a deadline."
    parser = make_parser("doctor", description, _EXAMPLES)
    parser.add_argument(
        "words",
        nargs="*",
        metavar="PACKAGE | key=value",
        help="only plugins of this name or package; or settings of a run",
    )
    parser.add_argument("--plugins", action="store_true", help="also check all plugins")
    parser.add_argument("--json", action="store_true", help="as JSON, for programs")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="seconds for each check (default 60)")
    parser.add_argument("--output", default="outputs", metavar="DIR", help="directory of future runs (default outputs)")
    return parser
