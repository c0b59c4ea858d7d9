"""Compare a plugin with the Protocol of its kind and report all differences."""

from __future__ import annotations

import difflib
import inspect
from typing import Any

_FUNCTIONS = {"reward": "Reward", "command": "command"}
"""Kinds that may also be functions. Rewards have several signatures; see `rlcore.rewards.signature`."""


def misses(kind: str, plugin: object) -> tuple[str, list[str]]:
    """Return the name of the protocol and a list of everything that the plugin lacks."""
    if kind in _FUNCTIONS:
        lacking = [] if callable(plugin) else [f"it is a {type(plugin).__name__}, which cannot be called"]
        return _FUNCTIONS[kind], lacking
    from rlcore.protocols import PROTOCOLS

    protocol = PROTOCOLS.get(kind)
    if protocol is None:
        return "", []
    if not inspect.isclass(plugin):
        return protocol.__name__, [f"it is a {type(plugin).__name__}, not a class"]
    return protocol.__name__, [miss for name in _methods(protocol) for miss in _miss(protocol, plugin, name)]


def misspellings(kind: str, plugin: object) -> list[str]:
    """Return a message for each name of a plugin that is close to an optional member that it lacks."""
    from rlcore.protocols.optional import OPTIONAL

    members = {name for protocol in OPTIONAL.get(kind, ()) for name in (*protocol.__annotations__, *_methods(protocol))}
    absent = sorted(name for name in members if getattr(plugin, name, None) is None)
    found = []
    for own in dir(plugin):
        if not own.startswith("_") and (meant := difflib.get_close_matches(own, absent, n=1, cutoff=0.85)):
            found.append(f"'{own}' has no effect; did you mean '{meant[0]}'?")
    return found


def _methods(protocol: type) -> list[str]:
    return [name for name, value in vars(protocol).items() if inspect.isfunction(value) and not name.startswith("_")]


def _miss(protocol: type, plugin: type, name: str) -> list[str]:
    """Return the mismatches of a method with the protocol: missing parameters and additional required ones."""
    method: Any = getattr(plugin, name, None)
    if method is None or not callable(method):
        return [f"no method {name}"]
    has = list(inspect.signature(method).parameters.values())
    if any(it.kind in (it.VAR_POSITIONAL, it.VAR_KEYWORD) for it in has):
        return []
    asked = list(inspect.signature(getattr(protocol, name)).parameters.values())
    if isinstance(inspect.getattr_static(plugin, name), (staticmethod, classmethod)):
        asked = asked[1:]
    positional = [it for it in has if it.kind is not it.KEYWORD_ONLY]
    wanted = [it for it in asked if it.kind is it.POSITIONAL_OR_KEYWORD]
    by_name = [it.name for it in asked if it.kind is it.KEYWORD_ONLY]
    lacking = [asked_for for asked_for in by_name if asked_for not in {it.name for it in has}]
    lacking += [it.name for it in wanted[len(positional) :]]
    others = [*positional[len(wanted) :], *(it for it in has if it.kind is it.KEYWORD_ONLY)]
    beyond = [it.name for it in others if it.default is it.empty and it.name not in by_name]
    found = [f"{name}() lacks {_quoted(lacking)}"] if lacking else []
    return found + ([f"{name}() requires {_quoted(beyond)}, which rlcore does not pass"] if beyond else [])


def _quoted(names: list[str]) -> str:
    return ", ".join(map(repr, names))
