"""Plugins of the rlcore project, installed or not, so that an error for a missing one can name its package.

The index is `known.json`, generated from the entry points of the plugins by `python docs/make_known.py`.
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


def known_names(kind: str) -> dict[str, str]:
    """Return name -> package of the known plugins of a kind."""
    return known_plugins().get(kind, {})
