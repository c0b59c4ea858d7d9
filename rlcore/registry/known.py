"""Plugins of the rlcore project, installed or not, so that an error for a missing one can name its package.

`python docs/make_known.py` generates the indices: `known.json` from the entry points of the plugins, and
`known_settings.json` from their settings.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path


@functools.cache
def known_plugins() -> dict[str, dict[str, str]]:
    """Return kind -> name -> the package that provides it."""
    index: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("known.json").read_text())
    return index


@functools.cache
def settings_of_plugins(section: str) -> dict[str, list[str]]:
    """Return setting -> known plugins that have it, for a section that chooses one. Example: {"lora_rank": ["fsdp"]}"""
    index: dict[str, dict[str, list[str]]]
    index = json.loads(Path(__file__).with_name("known_settings.json").read_text())
    return index.get(section, {})


def known_names(kind: str) -> dict[str, str]:
    """Return name -> package of the known plugins of a kind."""
    return known_plugins().get(kind, {})
