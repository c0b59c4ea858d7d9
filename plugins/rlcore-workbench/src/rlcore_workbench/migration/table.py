"""Tables of keys that can be translated alone; tables/NAME.toml has one for each trainer."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from importlib.resources import files
from typing import Any

from rlcore_workbench.migration.answer import HOWS, Answer
from rlcore_workbench.migration.launch import Launch


@dataclass(frozen=True, slots=True)
class Table:
    """Keys of a trainer, its defaults, and settings without a key."""

    same: Mapping[str, str]
    """Key -> setting with the same meaning."""
    notes: Mapping[str, Answer]
    """Key, or pattern of fnmatch, -> answer. The exact key counts, otherwise the first pattern that matches."""
    defaults: Mapping[str, Any]
    """Key -> value, for defaults of the trainer that differ from rlcore's."""
    fixed: Mapping[str, Any]
    """Setting -> value, for settings without a key."""
    renamed: Mapping[str, str]
    """Regular expression -> replacement, for other names of keys."""

    values: Mapping[str, Mapping[str, Any]]
    """Key -> value, or pattern, -> settings, or the reason why none is needed; `else` is the reason for other values."""
    without: Mapping[str, str]
    """Key or pattern -> condition `KEY` or `KEY=VALUE|VALUE`, without which it has no effect."""

    def unused(self, launch: Launch, key: str) -> Answer | None:
        """Return an answer if the key has no effect in this launch."""
        for condition in (it for pattern, it in self.without.items() if fnmatchcase(key, pattern)):
            name, _, wanted = condition.partition("=")
            value = launch.get(name, self.defaults.get(name))
            if not (str(value) in wanted.split("|") if wanted else value):
                return Answer("always", note=f"has no effect without {condition}")
        return None

    def known(self, key: str) -> str:
        """Return the name that the table has for a key."""
        for pattern, name in self.renamed.items():
            key = re.sub(pattern, name, key)
        return key

    def answer(self, key: str, value: Any) -> Answer | None:
        """Return the answer for a key, or None if the table does not have it."""
        if key in self.values:
            return _chosen(self.values[key], value)
        if key in self.same:
            if value is None:
                return Answer("always", note="null: the default")
            return Answer("set", ((self.same[key], _converted(self.same[key], value)),))
        found = self.note(key)
        return Answer("always", note="null: the default") if found and value is None else found

    def note(self, key: str) -> Answer | None:
        """Return the answer for a key whose value does not matter, or None."""
        fits = (answer for pattern, answer in self.notes.items() if fnmatchcase(key, pattern))
        return self.notes.get(key) or next(fits, None)


@lru_cache
def read_table(name: str) -> Table:
    """Return the table of a trainer. It extends the table that `base` names; `defaults` replaces the defaults of that
    table, `more_defaults` adds to them."""
    sections = tomllib.loads(files("rlcore_workbench").joinpath("tables", f"{name}.toml").read_text("utf-8"))
    base = read_table(sections["base"]) if "base" in sections else Table({}, {}, {}, {}, {}, {}, {})
    notes = {key: Answer(how, note=note) for how in HOWS[1:] for key, note in sections.get(how, {}).items()}
    notes |= {key: Answer("set", note=f"part of {other}") for key, other in sections.get("part", {}).items()}
    return Table(
        {**{key: setting for key, setting in base.same.items() if key not in notes}, **sections.get("set", {})},
        {**notes, **{key: answer for key, answer in base.notes.items() if key not in notes}},
        sections.get("defaults", base.defaults) | sections.get("more_defaults", {}),
        {**base.fixed, **sections.get("fixed", {})},
        {**sections.get("renamed", {}), **base.renamed},
        {**base.values, **sections.get("values", {})},
        {**base.without, **sections.get("without", {})},
    )


def _chosen(choices: Mapping[str, Any], value: Any) -> Answer:
    name = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    found = next((choices[pattern] for pattern in choices if fnmatchcase(name, pattern)), None)
    if found is None:
        return Answer("none", note=choices.get("else", f"not one of {', '.join(choices)}"))
    return Answer("always", note=found) if isinstance(found, str) else Answer("set", tuple(found.items()))


def _converted(setting: str, value: Any) -> Any:
    """Join a list of files with commas, and convert -1 (none, or never) to 0."""
    if isinstance(value, list) and setting.startswith("data."):
        return ",".join(map(str, value))
    return 0 if isinstance(value, int) and value == -1 else value
