"""Hooks for observers, with pluggy. Anything whose order matters is a list in the config instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlcore.hooks.manager import Hooks as Hooks
    from rlcore.hooks.specs import Check as Check
    from rlcore.hooks.specs import RunView as RunView
    from rlcore.hooks.specs import hookimpl as hookimpl

_HOMES = {
    "Check": "rlcore.hooks.specs",
    "Hooks": "rlcore.hooks.manager",
    "RunView": "rlcore.hooks.specs",
    "hookimpl": "rlcore.hooks.specs",
}
__all__ = ["Check", "Hooks", "RunView", "hookimpl"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rlcore.hooks' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
