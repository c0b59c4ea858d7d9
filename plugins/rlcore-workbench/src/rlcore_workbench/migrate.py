"""`rlcore migrate`: translate a verl launch command into an rlcore command, with a line for every key."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlcore.cli import make_parser
from rlcore.errors import ConfigError
from rlcore_workbench.verl.answer import Line
from rlcore_workbench.verl.checked import written
from rlcore_workbench.verl.command import read_launch
from rlcore_workbench.verl.translate import Translation, translate

_EXAMPLES = """\
examples:
  rlcore migrate 'python3 -m verl.trainer.main_ppo data.train_files=train.parquet algorithm.adv_estimator=grpo ...'
  rlcore migrate run_qwen2-7b.sh                         a script; it is not executed
  rlcore migrate run_qwen2-7b.sh --command-only > run.sh

exit code: 0 every key has a counterpart, 1 some have none or only a partial one, 2 the launch is refused
"""
_TITLES = {
    "set": "settings",
    "always": "nothing to set",
    "partly": "PARTIAL COUNTERPART",
    "none": "NO COUNTERPART",
}


def main(argv: Sequence[str]) -> int:
    """Run the command and return the exit code."""
    parser = make_parser("migrate", "Translate a verl launch command into an rlcore command.", _EXAMPLES)
    parser.add_argument("launch", nargs="+", help="the command, or a script that contains it")
    parser.add_argument("--command-only", action="store_true", help="print only the command")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options, more = parser.parse_known_args(list(argv))  # the launch may contain arguments that begin with dashes
    done = translate(read_launch(_text([*options.launch, *more])))
    if options.json:
        print(json.dumps(_plain(done), ensure_ascii=False, indent=2))
    else:
        print(command(done.settings))
        if not options.command_only:
            print(explained(done))
    return 1 if done.of("partly", "none") else 0


def _text(words: Sequence[str]) -> str:
    """Return the text of the launch, from a file or from the command line."""
    if len(words) > 1:
        return shlex.join(words)
    if "=" not in words[0]:
        path = Path(words[0]).expanduser()
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{words[0]} is neither a readable script nor a command with settings: {error}\n"
                "Type  rlcore migrate SCRIPT   or  rlcore migrate 'python3 -m verl.trainer.main_ppo key=value …'"
            ) from error
    return words[0]


def command(settings: dict[str, Any]) -> str:
    """Return the `rlcore train` command with one setting per line, quoted for a shell; variables stay variables."""
    words = [_quoted(f"{name}={written(value)}") for name, value in settings.items()]
    return " \\\n    ".join(["rlcore train", *words])


def _quoted(word: str) -> str:
    if "$" in word:
        return '"' + re.sub(r'([\\"`])', r"\\\1", word) + '"'
    return shlex.quote(word)


def explained(done: Translation) -> str:
    """Return a report of each key with its counterpart, or the reason why there is none."""
    lines = []
    for how in ("set", "always", "partly", "none"):
        if chosen := done.of(how):
            lines += ["", f"{_TITLES[how]} ({len(chosen)})", *(_line(line) for line in chosen)]
    if defaults := [line for line in done.lines if not line.given]:
        lines += ["", f"not given, default of verl differs from rlcore ({len(defaults)})", *map(_line, defaults)]
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
    return {"settings": done.settings, "keys": keys, "remarks": done.remarks}
