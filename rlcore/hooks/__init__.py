"""Hooks for observers, with pluggy. Anything whose order matters is a list in the config instead."""

from rlcore.hooks.manager import Hooks
from rlcore.hooks.specs import Check, RunView, hookimpl

__all__ = ["Check", "Hooks", "RunView", "hookimpl"]
