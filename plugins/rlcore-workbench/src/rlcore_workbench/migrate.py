"""`rlcore migrate`: translate a launch of verl, TRL, OpenRLHF or prime-rl, with a line for every key."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlcore.cli import make_parser
from rlcore_workbench.migration import openrlhf, prime_rl, trl
from rlcore_workbench.migration.answer import Line
from rlcore_workbench.migration.checked import written
from rlcore_workbench.migration.launch import read_text
from rlcore_workbench.migration.programs import only_one, programs
from rlcore_workbench.migration.sandbox import execute
from rlcore_workbench.migration.shell import read_commands
from rlcore_workbench.migration.translation import Translation
from rlcore_workbench.verl import translate as verl
from rlcore_workbench.verl.command import launch_of

_EXAMPLES = """\
examples:
  rlcore migrate 'python3 -m verl.trainer.main_ppo data.train_files=train.parquet algorithm.adv_estimator=grpo ...'
  rlcore migrate run_qwen2-7b.sh                         a script; it is not executed
  rlcore migrate run_qwen2-7b.sh --command-only > run.sh
  rlcore migrate train_grpo.py                           TRL: a file that calls GRPOConfig; it is not executed
  rlcore migrate 'trl grpo --config grpo.yaml'           or grpo.yaml
  rlcore migrate 'python3 -m openrlhf.cli.train_ppo_ray --algo.advantage.estimator rloo …'
  rlcore migrate rl.toml                                 prime-rl
  rlcore migrate --execute run_qwen2-7b.sh 8 out         run it in a sandbox, with the arguments 8 and out

exit code: 0 every key has a counterpart, 1 some have none or only a partial one, 2 the launch is refused
"""
_SOURCES = {
    openrlhf: "python3 -m openrlhf.cli.train_ppo_ray --key value …",
    trl: "trl grpo --key value …",
    prime_rl: "rl @ FILE.toml",
}
"""Trainer -> example of a launch; everything else is read as a launch of verl."""
_FILES: dict[str, Callable[[Path, str], Translation]] = {
    ".py": lambda path, text: trl.translate(trl.read_python(path, text)),
    ".yaml": lambda path, text: trl.translate(trl.read_yaml(path)),
    ".yml": lambda path, text: trl.translate(trl.read_yaml(path)),
    ".toml": lambda path, text: prime_rl.translate(prime_rl.read_toml(path, text)),
}
"""Suffix -> function that translates such a file."""
_TITLES = {
    "set": "settings",
    "always": "nothing to set",
    "partly": "PARTIAL COUNTERPART",
    "none": "NO COUNTERPART",
}


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    parser = make_parser(
        "migrate", "Translate a launch of verl, TRL, OpenRLHF or prime-rl into an rlcore command.", _EXAMPLES
    )
    parser.add_argument("launch", nargs="+", help="the command, or a script that contains it")
    parser.add_argument("--execute", action="store_true", help="run the script in a sandbox, with stubs for programs")
    parser.add_argument("--command-only", action="store_true", help="print only the command")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options, more = parser.parse_known_args(list(argv))  # the launch may contain arguments that begin with dashes
    done = translated([*options.launch, *more], run=options.execute)
    if options.json:
        print(json.dumps(_plain(done), ensure_ascii=False, indent=2))
    else:
        print(command(done.settings, done.command))
        if not options.command_only:
            print(explained(done))
    return 1 if done.of("partly", "none") else 0


def translated(words: Sequence[str], *, run: bool = False) -> Translation:
    """Translate a launch.

    Args:
        words: a command, in one word or several, or the path of a file. With `run`, a script and its arguments.
        run: run the script in a sandbox, instead of reading it.

    Raises:
        ConfigError: the launch cannot be read, or has another trainer, algorithm or backend than rlcore.
    """
    text = _content(words[0]) if run or len(words) == 1 else shlex.join(words)
    path = Path(os.path.expanduser(words[0]))
    if len(words) == 1 and path.suffix in _FILES and os.path.isfile(path):
        return _FILES[path.suffix](path, text)
    commands, remarks = execute(path, words[1:]) if run else read_commands(text)
    found = programs(commands)
    for source, example in _SOURCES.items():
        if launches := [it for it in found if source.is_launch(it)]:
            launch = source.read_command(only_one(launches, example))
            launch.remarks += remarks
            done: Translation = source.translate(launch)
            return done
    return verl.translate(launch_of(found, remarks))


def _content(word: str) -> str:
    """Return the text of a file, or a command in one word."""
    path = Path(os.path.expanduser(word))
    if ("=" in word or " " in word) and not os.path.isfile(path):
        return word
    return read_text(
        path, "Type  rlcore migrate SCRIPT   or  rlcore migrate 'python3 -m verl.trainer.main_ppo key=value …'"
    )


def command(settings: dict[str, Any], begin: Sequence[str] = ("rlcore", "train")) -> str:
    """Return the command with one setting per line, quoted for a shell; variables stay variables."""
    words = [_quoted(f"{name}={written(value)}") for name, value in settings.items()]
    return " \\\n    ".join([" ".join(map(_quoted, begin)), *words])


def _quoted(word: str) -> str:
    """Quote a word; only ${NAME}, which the reader of a script leaves for a variable that it does not set, stays live."""
    parts = re.split(r"(\$\{[A-Za-z_]\w*\})", word)
    return "".join(f'"{part}"' if i % 2 else shlex.quote(part) for i, part in enumerate(parts) if part)


def explained(done: Translation) -> str:
    """Return a report of each key with its counterpart, or the reason why there is none."""
    lines = []
    for how in ("set", "always", "partly", "none"):
        if chosen := done.of(how):
            lines += ["", f"{_TITLES[how]} ({len(chosen)})", *(_line(line) for line in chosen)]
    if defaults := [line for line in done.lines if not line.given]:
        lines += ["", f"not given, default that differs from rlcore ({len(defaults)})", *map(_line, defaults)]
    if done.remarks:
        lines += ["", "before you run it", *(f"  {remark}" for remark in done.remarks)]
    open_ones = len(done.of("partly", "none"))
    total = len([line for line in done.lines if line.given])
    lines += ["", f"{total} keys: {total - open_ones} have a counterpart or need none, {open_ones} do not"]
    return "\n".join(lines)


def _line(line: Line) -> str:
    settings = " ".join(f"{name}={written(value)}" for name, value in line.answer.settings)
    said = "; ".join(part for part in (settings, line.answer.note) if part)
    given = f"{line.key}={line.value}" if line.value else line.key
    return f"  {given:<62}  {said}"


def _plain(done: Translation) -> dict[str, Any]:
    keys = [
        {
            "key": line.key,
            "value": line.value,
            "how": line.answer.how,
            "settings": dict(line.answer.settings),
            "note": line.answer.note,
            "given": line.given,
        }
        for line in done.lines
    ]
    return {"command": done.command, "settings": done.settings, "keys": keys, "remarks": done.remarks}
