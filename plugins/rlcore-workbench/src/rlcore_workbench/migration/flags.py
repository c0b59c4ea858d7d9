"""Settings of a program that takes them as flags: --key value, --key=value, --switch."""

from __future__ import annotations

from rlcore.errors import ConfigError
from rlcore_workbench.migration.launch import Launch, parse_value
from rlcore_workbench.migration.programs import Program
from rlcore_workbench.migration.words import Word


def read_flags(found: Program, trainer: str) -> Launch:
    """Return the flags of a program. A flag with several values becomes a list; one without a value is true.

    Raises:
        ConfigError: an argument cannot be read, so it is not known to which flag it belongs.
    """
    launch = Launch(module=found.name, trainer=trainer)
    key, values = "", list[Word]()
    for word in (*found.arguments, Word("--")):
        if word.text.startswith("--"):
            if key:
                _put(launch, key, values)
            key, equals, value = word.text.removeprefix("--").partition("=")
            values = [Word(value, word.unreadable)] if equals else []
            launch.others += [word.text] if equals and not key else []
        elif word.unreadable and not key:
            raise ConfigError(
                f"line {found.line}: the argument {word.text} could not be read: {word.unreadable}\n"
                "Type the launch as one command, with the value written out."
            )
        elif key:
            values.append(word)
        else:
            launch.others.append(word.text)
    return launch


def _put(launch: Launch, key: str, values: list[Word]) -> None:
    parsed = [parse_value(word.text) for word in values]
    value = True if not values else parsed[0] if len(values) == 1 else parsed
    reason = next((word.unreadable for word in values if word.unreadable), "")
    launch.put(key, " ".join(word.text for word in values), value, reason)
