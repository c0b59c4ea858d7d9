"""Check settings as `rlcore train` would: compose the config of the run, and build the Config of each chosen plugin."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from rlcore.config.build import build_plugin, flatten, type_of
from rlcore.config.compose import PLUGIN_SECTIONS, compose
from rlcore.config.schema import Choice, Config
from rlcore.errors import UserError
from rlcore.registry import resolve

_VARIABLE = re.compile(r"\$\{(\w+)\}")
_ITEMS = ("reward", "trackers")
"""Sections whose single value contains names and texts."""


class Checked:
    """Settings that rlcore accepts. They are offered in parts; refusing one part keeps the others."""

    def __init__(self, chosen: Mapping[str, Any]) -> None:
        """Resolve the plugins named in `chosen`. Settings of plugins that are not installed are not checked."""
        self.settings: dict[str, Any] = {}
        self.remarks: list[str] = []
        self._skipped: set[str] = set()
        for section in PLUGIN_SECTIONS:
            if section in chosen:
                self._choose(section, str(chosen[section]))

    def _choose(self, section: str, name: str) -> None:
        try:
            resolve(section, name)
        except UserError as error:
            self._skipped.add(section)
            self.remarks.append(f"settings of {section}={name} are not checked: {_first_line(error)}")
        else:
            self.settings[section] = name

    def offer(self, part: Mapping[str, Any]) -> str:
        """Accept a part; return the reason if it is refused, otherwise an empty text."""
        settings = {**self.settings, **part}
        try:
            self._build(settings)
        except UserError as error:
            return _first_line(error)
        self.settings = settings
        return ""

    def offer_all(self, parts: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return the reason for each refused part. A part may depend on a later one."""
        reasons, left = [""] * len(parts), list(range(len(parts)))
        while left:
            self._divide(parts, left, reasons)
            refused = [i for i in left if reasons[i]]
            if refused == left:
                break
            left = refused
        return reasons

    def _divide(self, parts: Sequence[Mapping[str, Any]], chosen: Sequence[int], reasons: list[str]) -> None:
        """Set the reasons of the chosen parts; they are offered together, or in halves if they are refused."""
        reason = self.offer({name: value for i in chosen for name, value in parts[i].items()})
        if not reason or len(chosen) == 1:
            for i in chosen:
                reasons[i] = reason
            return
        middle = len(chosen) // 2
        self._divide(parts, chosen[:middle], reasons)
        self._divide(parts, chosen[middle:], reasons)

    def _build(self, settings: Mapping[str, Any]) -> None:
        words = []
        for name, value in settings.items():
            _check_variables(name, value)
            if name not in self._skipped:
                words.append(f"{name}={_VARIABLE.sub('variable', written(value))}")
        config = compose(words, complete=False).config
        for section in PLUGIN_SECTIONS:
            choice = getattr(config, section)
            if choice.name and section not in self._skipped:
                build_plugin(section, choice, resolve(section, choice.name).object)


def defaults_of(section: str, name: str) -> dict[str, Any]:
    """Return a plugin's own defaults, without the section name. Raises UserError if it is not installed."""
    return flatten(build_plugin(section, Choice(name=name), resolve(section, name).object))


def written(value: Any) -> str:
    """Format a value for the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {written(it)}' for name, it in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(written, value))}]"
    return str(value)


def _check_variables(name: str, value: Any) -> None:
    """Refuse a shell variable where the setting is not text."""
    unset = _VARIABLE.findall(str(value))
    if unset and name not in _ITEMS and str not in (type_of(Config, name), *get_args(type_of(Config, name))):
        raise UserError(f"the script does not set {', '.join(unset)}, and {name} needs a value")


def _first_line(error: UserError) -> str:
    return str(error).splitlines()[0].rstrip(":")
