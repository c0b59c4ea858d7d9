"""Hooks for observers, with pluggy. Anything whose order matters is a list in the config instead."""

from __future__ import annotations

from typing import Any

_HOMES = {"Check": "rlcore.hooks.specs", "Hooks": "rlcore.hooks.manager", "hookimpl": "rlcore.hooks.specs"}
__all__ = ["Check", "Hooks", "hookimpl"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rlcore.hooks' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
