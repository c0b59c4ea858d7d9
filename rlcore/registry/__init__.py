"""Plugins by name: found through package metadata, listed without import, imported when chosen."""

from rlcore.registry.catalog import KINDS, Catalog, Entry, PluginSpec, catalog, refresh
from rlcore.registry.protocol_check import misspellings
from rlcore.registry.resolve import PYTHON, Resolved, load, resolve

__all__ = [
    "KINDS",
    "PYTHON",
    "Catalog",
    "Entry",
    "PluginSpec",
    "Resolved",
    "catalog",
    "load",
    "misspellings",
    "refresh",
    "resolve",
]
