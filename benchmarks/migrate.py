"""Translate every launch in checkouts of other trainers with `rlcore migrate`, and print a table of the results.

    python benchmarks/migrate.py [--execute] verl/examples verl-recipe trl/examples OpenRLHF/examples prime-rl/configs

Files that launch nothing that is translated, such as scripts that prepare data, are counted apart; `--list` prints them
with the reason. A command is valid if bash passes on the words that were printed, and accepted if the settings
compose, as for `rlcore config`. A key is lost if the text of the file has it and the translation does not list it. With
`--execute`, scripts run in the sandbox, and a key is lost if it reaches the trainer there.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlcore_workbench.migrate import command, translated
from rlcore_workbench.migration.answer import HOWS

from rlcore.config.compose import compose
from rlcore.errors import ConfigError, UserError

_RECORDER = 'rlcore() { printf "%s\\0" "$@"; }\n'
_HOWS = ("set", "needs none", "partly", "none")
_COLUMNS = ("files", "no launch", "refused", "translated", "valid", "accepted", *_HOWS, "lost")
_KEY = re.compile(
    r"(?<![\w.$/{~@-])(?:\+*((?:actor_rollout_ref|algorithm|async_training|critic|custom_reward_function|data|reward"
    r"|reward_model|rollout|trainer)(?:\.[\w@-]+)+)=|--((?:actor|algo|ckpt|critic|data|ds|eval|logger|model|ref|reward"
    r"|rollout|train|vllm)\.[\w.-]+))"
)
"""Key of verl, or of OpenRLHF, in a script."""
_NAME = re.compile(r"^\+*([\w.@\[\]-]+)=?.*", re.DOTALL)
"""Setting whose key is not in the tables, as it is listed."""


def launches(directory: Path) -> list[Path]:
    """Return shell scripts, TOML files, and Python files with a GRPOConfig, below a directory."""
    found = [
        path for pattern in ("*.sh", "*.toml") for path in directory.rglob(pattern) if path.name != "pyproject.toml"
    ]
    found += [path for path in directory.rglob("*.py") if _configures_grpo(path.read_text("utf-8", "replace"))]
    return sorted(found)


def _configures_grpo(text: str) -> bool:
    if "GRPOConfig(" not in text:
        return False
    calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    return any(isinstance(call.func, ast.Name) and call.func.id == "GRPOConfig" for call in calls)


def keys_of(path: Path) -> set[str]:
    """Return the keys that the text of a file has, found without the readers of `rlcore migrate`."""
    text = path.read_text("utf-8", "replace")
    if path.suffix == ".toml":
        return set(_dotted(tomllib.loads(text)))
    if path.suffix == ".py":
        calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
        return {it.arg for call in calls if ast.unparse(call.func) == "GRPOConfig" for it in call.keywords if it.arg}
    lines = (line for line in text.splitlines() if not line.lstrip().startswith(("#", "echo")))
    return {match[1] or match[2] for line in lines for match in _KEY.finditer(line)}


def _dotted(content: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in content.items():
        for item in value if isinstance(value, list) and value and isinstance(value[0], dict) else [value]:
            if isinstance(item, dict) and item:
                yield from _dotted(item, f"{prefix}{name}{'[]' if item is not value else ''}.")
            else:
                yield prefix + name


def words_of(text: str) -> list[str] | None:
    """Return the arguments that bash passes to rlcore, or None if it does not accept the command."""
    done = subprocess.run(["bash"], input=_RECORDER + text, capture_output=True, text=True, timeout=60)
    return None if done.returncode or done.stderr else done.stdout.split("\0")[:-1]


def accepted(words: list[str]) -> str:
    """Return the reason why the settings do not compose, or an empty text."""
    try:
        compose([word for word in words[1:] if "=" in word], complete=False)
    except UserError as error:
        return str(error).splitlines()[0]
    return ""


def main() -> None:
    """Print one row for each directory, and one for all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="+", type=Path)
    parser.add_argument("--execute", action="store_true", help="run scripts in the sandbox to find lost keys")
    parser.add_argument("--list", action="store_true", help="print what was refused or not accepted, with the reason")
    parser.add_argument("--open", type=int, default=0, metavar="N", help="print the N most frequent keys without one")
    options = parser.parse_args()
    rows: dict[str, Counter[str]] = {}
    missing: Counter[tuple[str, str, str]] = Counter()
    for directory in options.directories:
        count = rows[str(directory)] = Counter()
        for path in launches(directory):
            _count(path, count, missing, options)
    rows["all"] = sum(rows.values(), Counter())
    print("| " + " | ".join(["set", *_COLUMNS]) + " |")
    print("|---" * (len(_COLUMNS) + 1) + "|")
    for name, count in rows.items():
        print("| " + " | ".join([name, *(f"{count[column]:,}" for column in _COLUMNS)]) + " |")
    for (how, key, note), number in missing.most_common(options.open):
        print(f"{number:5} {how:<7} {key}  {note}")


def _count(
    path: Path, count: Counter[str], missing: Counter[tuple[str, str, str]], options: argparse.Namespace
) -> None:
    count["files"] += 1
    try:
        done = translated([str(path)])
    except ConfigError as error:
        first = str(error).splitlines()[0]
        kind = "no launch" if "no launch" in first or "started no program" in first else "refused"
        count[kind] += 1
        if options.list:
            print(f"{kind:<12} {path}: {first}")
        return
    count["translated"] += 1
    for how, column in zip(HOWS, _HOWS, strict=True):
        count[column] += len(done.of(how))
    missing.update((line.answer.how, line.key, line.answer.note) for line in done.of("partly", "none"))
    words = words_of(command(done.settings, done.command))
    reason = "not valid bash" if words is None else accepted(words)
    count["valid"] += words is not None
    count["accepted"] += not reason
    if reason and options.list:
        print(f"{'not accepted':<12} {path}: {reason}")
    keys = keys_that_ran(path) if options.execute and path.suffix == ".sh" else set()
    given = {_NAME.sub(r"\1", key) for key in keys or keys_of(path)}
    lost = given - {_NAME.sub(r"\1", line.key) for line in done.lines}
    count["lost"] += len(lost)
    if lost and options.list:
        print(f"{'lost':<12} {path}: {', '.join(sorted(lost))}")


def keys_that_ran(path: Path) -> set[str]:
    """Return the keys that reach the trainer when a script runs in the sandbox; none if it needs more than a sandbox."""
    try:
        return {line.key for line in translated([str(path)], run=True).lines if line.given}
    except ConfigError:
        return set()


if __name__ == "__main__":
    main()
