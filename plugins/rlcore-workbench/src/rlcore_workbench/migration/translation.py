"""Translate a launch to settings of rlcore, key by key, without dropping any."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rlcore.config.compose import PLUGIN_SECTIONS
from rlcore.errors import UserError, did_you_mean
from rlcore_workbench.migration.answer import Answer, Line, Rule
from rlcore_workbench.migration.checked import Checked, defaults_of
from rlcore_workbench.migration.launch import Launch, Unreadable
from rlcore_workbench.migration.table import Table


@dataclass(slots=True)
class Translation:
    """Translation of a launch."""

    lines: list[Line] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    command: tuple[str, ...] = ("rlcore", "train")
    """Words before the settings."""
    _sources: dict[str, str] = field(default_factory=dict)
    """Setting -> key that set it."""

    def of(self, *hows: str) -> list[Line]:
        """Return the given keys with these kinds of answers."""
        return [line for line in self.lines if line.given and line.answer.how in hows]

    def add(self, line: Line) -> None:
        """Add a line. If two keys need different values of one setting, the first one counts; the other is reported."""
        for setting, value in line.answer.settings:
            if setting in self.settings and self.settings[setting] != value:
                other = f"{setting} is already {self.settings[setting]}, from {self._sources[setting]}"
                answer = Answer("none", note=f"one setting for both keys: {other}")
                self.lines.append(replace(line, answer=answer))
                return
        for setting, value in line.answer.settings:
            self.settings[setting] = value
            self._sources.setdefault(setting, line.key)
        self.lines.append(line)

    def check(self) -> None:
        """Remove settings that rlcore refuses, with the reason, and defaults that the algorithm shares."""
        chosen: dict[str, Any] = {
            section: self.settings[section] for section in PLUGIN_SECTIONS if section in self.settings
        }
        checked = Checked(chosen)
        fixed = {name: self.settings[name] for name in self._fixed() if name not in PLUGIN_SECTIONS}
        refused, *reasons = checked.offer_all([fixed, *(dict(line.answer.settings) for line in self.lines)])
        own = _own_settings(str(chosen.get("algorithm", "")))
        lines = []
        for line, reason in zip(self.lines, reasons, strict=True):
            settings = line.answer.settings
            if reason:
                line = replace(line, answer=Answer("none", note=f"refused by rlcore: {reason}"))
            elif not line.given and settings:
                settings = tuple(pair for pair in settings if pair not in own)
                if not settings:
                    continue
                line = replace(line, answer=replace(line.answer, settings=settings))
            lines.append(line)
        self.lines = lines
        kept = {setting for line in lines for setting, _ in line.answer.settings} | self._fixed()
        self.settings = {setting: value for setting, value in self.settings.items() if setting in kept}
        self.remarks += [*([refused] if refused else []), *checked.remarks, *self._remarks()]

    def _remarks(self) -> list[str]:
        """Return remarks on values for the user to read before running the command."""
        variables = [f"{name}={value}" for name, value in self.settings.items() if "$" in str(value)]
        return [f"the command contains a variable: {it}" for it in variables]

    def finished(self, launch: Launch, *, needs_reward: bool) -> Translation:
        """Check the settings, and list arguments that are not settings; for trainers without further rules."""
        if needs_reward and "reward" not in self.settings:
            self.remarks.append("reward: the launch names none that can be translated; type  reward=FILE.py:NAME")
        self.check()
        other = Answer("none", note="an argument that is not translated")
        self.lines += [Line(text, "", other) for text in launch.others]
        return self

    def _fixed(self) -> set[str]:
        """Return the settings that no key has set."""
        return self.settings.keys() - self._sources.keys()


def _own_settings(algorithm: str) -> list[tuple[str, Any]]:
    try:
        return [(f"algorithm.{name}", value) for name, value in defaults_of("algorithm", algorithm).items()]
    except UserError:
        return []  # not installed, which `Checked` reports


def translate_keys(launch: Launch, table: Table, answer_of: Callable[[Launch, str, Any], Answer]) -> Translation:
    """Translate every key to a line. Settings follow the order of the keys; those of defaults come last."""
    done = Translation(remarks=list(launch.remarks))
    for key, text in launch.texts.items():
        done.add(Line(launch.typed.get(key, key), text, answer_of(launch, key, None)))
    shadowed = Answer("always", note="another name of a key that is given again later; the later value counts")
    done.lines += [Line(key, text, shadowed) for key, text in launch.shadowed.items()]
    for key, value in table.defaults.items():
        if not launch.has(key):
            answer = answer_of(launch, key, value)
            new = tuple(pair for pair in answer.settings if pair[0] not in done.settings)
            if new or answer.how == "partly":
                done.add(Line(key, str(value), replace(answer, settings=new), given=False))
    for setting, value in table.fixed.items():
        done.settings.setdefault(setting, value)
    done.remarks += [f"{text}: given again later; the later value counts" for text in launch.overridden]
    return done


def answer_for(launch: Launch, key: str, default: Any, rules: Mapping[str, Rule], table: Table) -> Answer:
    """Return the answer of a rule or of the table; `default` is the value of a key that the launch does not give."""
    if key in launch.unreadable:
        found = None if key in rules or key in table.same or key in table.values else table.note(key)
        if found and found.how != "set":
            return found
        return Answer("none", note=f"could not be read: {launch.unreadable[key]}")
    value = launch.get(key, default)
    try:
        answer = table.unused(launch, key) or (rules[key](launch, value) if key in rules else table.answer(key, value))
    except Unreadable as error:
        return Answer("none", note=str(error))
    except (TypeError, ValueError, ArithmeticError):
        return Answer("none", note=f"{value!r} is not a value of this key; write it out")
    hint = did_you_mean(key, [*rules, *table.values, *table.same, *table.notes])
    return answer or Answer("none", note=f"not in the table of `rlcore migrate`.{hint}")
