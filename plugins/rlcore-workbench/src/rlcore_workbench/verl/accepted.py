"""What the chosen algorithm says to the settings that came out: its own Config is built with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlcore.config.build import build_plugin, flatten
from rlcore.config.schema import Choice
from rlcore.errors import UserError
from rlcore.registry import resolve

SECTION = "algorithm."


class Accepted:
    """The settings of one algorithm, offered in parts; a part that is refused leaves the others as they are."""

    def __init__(self, name: str) -> None:
        """Raises UserError when the algorithm is not installed."""
        self._name, self._plugin = name, resolve("algorithm", name).object
        self.settings: dict[str, Any] = {}
        """Without the name of the section."""
        self.own: dict[str, Any] = flatten(build_plugin("algorithm", Choice(name=name), self._plugin))
        """What it does by itself."""

    def offer(self, part: Mapping[str, Any]) -> str:
        """Take the settings of a part; returns why not, or nothing."""
        settings = {**self.settings, **part}
        try:
            build_plugin("algorithm", Choice(name=self._name, options=_nested(settings)), self._plugin)
        except UserError as error:
            return str(error).splitlines()[0]
        self.settings = settings
        return ""

    def offer_all(self, parts: Sequence[Mapping[str, Any]]) -> list[str]:
        """Why each part is refused; one may be right only after another that comes later."""
        reasons, left = [""] * len(parts), list(range(len(parts)))
        while left:
            for i in left:
                reasons[i] = self.offer(parts[i])
            refused = [i for i in left if reasons[i]]
            if refused == left:
                break
            left = refused
        return reasons


def of_algorithm(settings: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Those of the section `algorithm` that can be judged: a variable of the shell cannot."""
    own = [(name.removeprefix(SECTION), value) for name, value in settings if name.startswith(SECTION)]
    return {name: value for name, value in own if "$" not in str(value)}


def _nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in settings.items():
        *sections, last = name.split(".")
        place = found
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return found
