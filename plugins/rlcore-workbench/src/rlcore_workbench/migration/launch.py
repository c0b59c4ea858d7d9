"""Settings of a launch of another trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlcore.errors import ConfigError


class Unreadable(ValueError):
    """Error of a rule that needs a key whose value could not be read."""


@dataclass(slots=True)
class Launch:
    """Settings of a launch, in order."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Key -> parsed value; the last value of a key counts."""
    texts: dict[str, str] = field(default_factory=dict)
    """Key -> value as typed, with the script's variables filled in. Includes keys that could not be read."""
    unreadable: dict[str, str] = field(default_factory=dict)
    """Key -> reason why its value could not be read."""
    others: list[str] = field(default_factory=list)
    """Arguments of the command that are not settings: --config-name=x, hydra.run.dir=x, ~trainer.logger."""
    module: str = ""
    """Module or file that the command runs."""
    trainer: str = ""
    """Trainer that it runs, such as ppo or sft."""
    typed: dict[str, str] = field(default_factory=dict)
    """Key -> its name in the launch, where that differs."""
    shadowed: dict[str, str] = field(default_factory=dict)
    """Key -> its value, for a key that another name of the same key replaces."""
    overridden: list[str] = field(default_factory=list)
    """Settings, as typed, that a later one of the same key replaces."""
    remarks: list[str] = field(default_factory=list)
    """Decisions of the reader about the launch."""

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or `default` if it is not given.

        Raises:
            Unreadable: the key is given, but its value could not be read.
        """
        if key in self.unreadable:
            raise Unreadable(f"needs {key}, whose value could not be read: {self.unreadable[key]}")
        return self.settings.get(key, default)

    def text(self, key: str, default: str = "") -> str:
        """Return the value of a key as typed. Raises as `get` does."""
        self.get(key)
        return self.texts.get(key, default)

    def has(self, key: str) -> bool:
        """Return whether the key is given, readable or not."""
        return key in self.texts

    def renamed(self, known: Callable[[str], str]) -> Launch:
        """Return the launch with the names of keys that the tables use."""
        launch = replace(self, settings={}, texts={}, unreadable={}, overridden=list(self.overridden))
        for key, text in self.texts.items():
            if launch.has(known(key)):
                launch.shadowed[launch.typed[known(key)]] = launch.texts[known(key)]
            launch.put(known(key), text, self.settings.get(key), self.unreadable.get(key, ""))
            launch.typed[known(key)] = key
        return launch

    def put(self, key: str, text: str, value: Any, unreadable: str = "") -> None:
        """Set a key; an earlier value is noted as overridden. `unreadable` is the reason why there is no value."""
        if self.has(key):
            self.overridden.append(f"{key}={self.texts.pop(key)}")
            self.settings.pop(key, None)
            self.unreadable.pop(key, None)
        self.texts[key] = text
        if unreadable:
            self.unreadable[key] = unreadable
        else:
            self.settings[key] = value


def known(launch: Launch, key: str) -> str:
    """Return the text of a key without which the launch cannot be read. Raises ConfigError if it is not known."""
    try:
        return launch.text(key)
    except Unreadable as error:
        raise ConfigError(f"the launch {error}\nType the launch as one command, with the value written out.") from None


def parse_value(text: str) -> Any:
    """Parse a value as Hydra does: True, 3, 1e-6, null, [a,b], text with or without quotes."""
    text = text.strip()
    if text[:1] in "'\"" and text[-1:] == text[:1] and len(text) > 1:
        return text[1:-1]
    if text[:1] == "[" and text[-1:] == "]":
        return [parse_value(part) for part in text[1:-1].split(",") if part.strip()]
    if text.lower() in ("true", "false", "null", "none"):
        return {"true": True, "false": False}.get(text.lower())
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def read_text(path: Path, example: str) -> str:
    """Return the text of a file. Raises ConfigError, with `example` as what to type, if it cannot be read or is empty."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path with a null byte
        raise ConfigError(
            f"{path} is neither a readable file nor a command with settings: {error}\n{example}"
        ) from error
    if not text.strip():
        raise ConfigError(f"{path} is empty\n{example}")
    return text
