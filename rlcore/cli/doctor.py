"""`rlcore doctor`: is this machine in order, and does every plugin load?

All of it runs in child processes (rlcore/cli/isolated.py). One child does the checks of one package in turn; when it
crashes, or one check passes its deadline, that check is broken and a new child goes on with the next.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

from rlcore.cli import machine
from rlcore.cli.isolated import run_jobs
from rlcore.cli.list_plugins import Row, list_plugins
from rlcore.errors import ConfigError, did_you_mean
from rlcore.registry.catalog import catalog, normalise

SETTINGS = ("settings", "model", "tokenizer", "data", "reward", "plan")
"""The checks of rlcore/cli/settings.py."""
SLOW_S = 10.0
"""A plugin that takes longer to import than this, with all that it imports, is called slow."""
_EXAMPLES = """\
examples:
  rlcore doctor                          this machine
  rlcore doctor --plugins                and every installed plugin
  rlcore doctor model.path=DIR data.train=train.jsonl reward=gsm8k
  rlcore doctor rlcore-vllm              the plugins of one package, with tracebacks
  rlcore doctor --plugins --json | jq '.[] | select(.status == "broken")'
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check found, and one object of --json; keys are only ever added."""

    kind: str
    """machine, settings, or the kind of a plugin."""
    name: str
    package: str = ""
    version: str = ""
    target: str = ""
    status: str = "ok"
    """ok, slow, warning, disabled or broken."""
    detail: str = ""
    fix: str = ""
    """The line to type."""
    seconds: float = 0.0
    traceback: str = ""


def main(argv: Sequence[str]) -> int:
    """Run the command; exit code 1 when something is broken."""
    options = _parser().parse_intermixed_args(list(argv))
    settings = [word for word in options.words if "=" in word]
    packages = [word for word in options.words if "=" not in word]
    findings: list[Finding] = []
    if not packages:
        checks = [Finding(kind="machine", name=name) for name in machine.CHECKS]
        findings += check_all(checks, options.timeout, options.output)
    if settings:
        checks = [Finding(kind="settings", name=name) for name in SETTINGS]
        findings += check_all(checks, options.timeout, options.output, settings)
    if options.plugins or packages:
        findings += check_plugins(packages, options.timeout)
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        print(_report(findings, tracebacks=bool(packages)))
    return int(any(finding.status == "broken" for finding in findings))


def check_plugins(wanted: Sequence[str], timeout_s: float) -> list[Finding]:
    """Import every installed plugin and compare it with its protocol, or those of the wanted packages only."""
    rows = list_plugins(catalog(), absent=False)
    for word in wanted:
        names = sorted({name for row in rows for name in (row.package, row.name)})
        if word not in names and normalise(word) not in names:
            raise ConfigError(
                f"no plugin or package '{word}' is installed.{did_you_mean(word, names)}\nType  rlcore list-plugins"
            )
    chosen = [row for row in rows if not wanted or {row.name, row.package} & {*wanted, *map(normalise, wanted)}]
    by_package = groupby(sorted(chosen, key=lambda row: row.package), key=lambda row: row.package)
    found = [it for _, group in by_package for it in check_all([_unchecked(row) for row in group], timeout_s, ".")]
    return sorted(found, key=lambda finding: (finding.kind, finding.name, finding.package))


def check_all(checks: Sequence[Finding], timeout_s: float, output: str, settings: Sequence[str] = ()) -> list[Finding]:
    """Fill in the findings, in child processes."""
    found = [finding for finding in checks if finding.status in ("disabled", "broken")]
    left = [finding for finding in checks if finding not in found]
    while left:
        jobs = [(it.kind, it.name, it.package) for it in left]
        answers, reason, printed = run_jobs(jobs, timeout_s, output, settings)
        found += [_judged(finding, answer) for finding, answer in zip(left, answers)]
        left = left[len(answers) :]
        if left:
            found.append(_lost(left.pop(0), reason, printed, timeout_s))
    return found


def _unchecked(row: Row) -> Finding:
    """A plugin before its check; what the metadata already tells stands."""
    finding = Finding(kind=row.kind, name=row.name, package=row.package, version=row.version, target=row.target)
    if row.status == "broken":
        return replace(finding, status="broken", detail=row.detail, fix=f"pip install -U {row.package}")
    if row.status == "disabled":
        return replace(finding, status="disabled", detail=row.detail)
    remark = row.status in ("unbounded", "duplicate")
    return replace(finding, status="warning", detail=f"{row.status}: {row.detail}") if remark else finding


def _lost(finding: Finding, reason: str, printed: str, timeout_s: float) -> Finding:
    """A check that brought its process down, or never ended."""
    fix = f"rlcore doctor {finding.package} --timeout {timeout_s * 4:g}".replace("  ", " ")
    if "no answer in" not in reason:
        fix = f"pip install --force-reinstall {finding.package}" if finding.package else ""
    return replace(finding, status="broken", detail=reason, fix=fix, traceback=printed[-4000:])


def _judged(finding: Finding, answer: Mapping[str, Any]) -> Finding:
    """A check that was answered; what was remarked before stands, when there is nothing worse."""
    if answer["status"] == "ok" and finding.package and answer["seconds"] > SLOW_S:
        fix = f"python -X importtime -c 'import {finding.target.partition(':')[0]}'"
        return replace(finding, status="slow", detail=f"loads in {answer['seconds']:.1f} s", fix=fix)
    if answer["status"] == "ok" and finding.status == "warning":
        return replace(finding, seconds=answer["seconds"])
    return replace(finding, **answer)


def _report(findings: Sequence[Finding], *, tracebacks: bool) -> str:
    lines = []
    width = max(len(_title(finding)) for finding in findings)
    for finding in findings:
        first, *rest = finding.detail.splitlines() or [""]
        lines.append(f"{finding.status:<8}  {_title(finding):<{width}}  {first}".rstrip())
        lines += [f"{'':<10}{line}" for line in rest]
        if finding.fix:
            lines.append(f"{'':<10}to type:  {finding.fix}")
        if tracebacks and finding.traceback:
            lines += ["", *(f"    {line}" for line in finding.traceback.splitlines()), ""]
    counts = {status: sum(it.status == status for it in findings) for status in ("broken", "slow", "warning")}
    bad = ", ".join(f"{number} {status}" for status, number in counts.items() if number)
    return "\n".join([*lines, f"{len(findings)} checks: {bad or 'all in order'}"])


def _title(finding: Finding) -> str:
    if not finding.package:
        return finding.name
    return f"{finding.kind} {finding.name} ({finding.package} {finding.version})"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlcore doctor",
        description="Check this machine and, each in a process with a deadline, that plugins load and meet their protocol.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="PACKAGE | key=value",
        help="only plugins of this name or package; settings of a run",
    )
    parser.add_argument("--plugins", action="store_true", help="all plugins, too")
    parser.add_argument("--json", action="store_true", help="as JSON, for programs")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="seconds for each check (default 60)")
    parser.add_argument("--output", default="outputs", metavar="DIR", help="where runs will lie (default outputs)")
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error in the input, too")
    return parser
