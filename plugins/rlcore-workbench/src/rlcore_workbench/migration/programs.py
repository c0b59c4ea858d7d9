"""Programs that a shell script runs, with their arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlcore.errors import ConfigError
from rlcore_workbench.migration.shell import Command
from rlcore_workbench.migration.words import Word

_NO_LAUNCH = ("echo", "printf", "export")


@dataclass(frozen=True, slots=True)
class Program:
    """Module, Python file or other program with its arguments."""

    name: str
    """Module or file; empty for a command that begins with a setting."""
    arguments: tuple[Word, ...]
    line: int


def programs(commands: Sequence[Command]) -> list[Program]:
    """Return the program of each command. Launchers such as torchrun, uv or ray are not part of it."""
    return [_split(it) for it in commands if not (it.words and it.words[0].text in _NO_LAUNCH)]


def _split(command: Command) -> Program:
    words = command.words
    for i, word in enumerate(words):
        if i and words[i - 1].text in ("-m", "--module"):
            return Program("an unknown module" if word.unreadable else word.text, words[i + 1 :], command.line)
        if word.text.endswith(".py") and "=" not in word.text and not word.unreadable:
            return Program(word.text, words[i + 1 :], command.line)
        if word.text in ("trl", "rl") and i < len(words) - 1:
            return Program(word.text, words[i + 1 :], command.line)
    bare = not words or "=" in words[0].text or words[0].text.startswith("~")
    return Program("" if bare else words[0].text, words if bare else words[1:], command.line)


def only_one(found: Sequence[Program], example: str) -> Program:
    """Return the program if all are launched with the same arguments.

    Raises:
        ConfigError: with the lines of the launches, and `example` as what to type.
    """
    if any((it.name, it.arguments) != (found[0].name, found[0].arguments) for it in found):
        lines = ", ".join(str(it.line) for it in found)
        raise ConfigError(
            f"found {len(found)} different launches, at lines {lines}\n"
            f"Type  rlcore migrate '{example}'   with the settings of one of them."
        )
    return found[0]
