"""Does a class have the methods and parameters of its kind's Protocol? All misses are told at once."""

from __future__ import annotations

import inspect
from typing import Any

_UNCHECKED = frozenset({"reward"})
"""Rewards are functions of many known shapes; `rlcore.rewards.signature` reads them."""
_IGNORED = frozenset({"__module__", "__doc__", "__dict__", "__weakref__", "__slots__", "__annotations__"})


def misses(kind: str, plugin: object) -> tuple[str, list[str]]:
    """(name of the protocol, what the plugin lacks)."""
    from rlcore.protocols import PROTOCOLS

    protocol = PROTOCOLS.get(kind)
    if protocol is None or kind in _UNCHECKED:
        return "", []
    if not inspect.isclass(plugin):
        return protocol.__name__, [f"it is a {type(plugin).__name__}, not a class"]
    return protocol.__name__, [miss for name in _methods(protocol) for miss in _miss(protocol, plugin, name)]


def _methods(protocol: type) -> list[str]:
    return [name for name, value in vars(protocol).items() if inspect.isfunction(value) and not name.startswith("_")]


def _miss(protocol: type, plugin: type, name: str) -> list[str]:
    method: Any = getattr(plugin, name, None)
    if method is None or not callable(method):
        return [f"no method {name}"]
    asked = inspect.signature(getattr(protocol, name)).parameters
    has = inspect.signature(method).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in has.values()):
        return []
    positional = [p for p in has.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in has.values()):
        return []
    wanted = [p for p in asked.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    lacking = [p.name for p in asked.values() if p.kind is p.KEYWORD_ONLY and p.name not in has]
    lacking += [p.name for p in wanted[len(positional) :]]
    return [f"{name}() lacks {', '.join(repr(parameter) for parameter in lacking)}"] if lacking else []
