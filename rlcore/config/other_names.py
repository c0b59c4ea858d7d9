"""Settings that do not exist here: those of other frameworks, and those of plugins that are not chosen."""

from __future__ import annotations

from pathlib import Path

from rlcore.registry.known import settings_of_plugins

_MOST = 4
"""Plugins named in one line."""


def advice(key: str) -> str:
    """Return what to type for a setting that does not exist, or "" if nothing is known about its name.

    Example: "backend.compile" -> "It is a setting of  backend=fsdp"
    """
    section, _, name = key.rpartition(".")
    path = Path(__file__).with_name("other_names.txt")
    rows = [line.split(" | ") for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    lines = {name: line for names, line in rows for name in names.split()}
    found = lines.get(name) or lines.get(key.partition(".")[0])
    choices = "  or  ".join(f"{section}={plugin}" for plugin in settings_of_plugins(section).get(name, ())[:_MOST])
    return "\n".join([*([f"Type  {found}"] if found else []), *([f"It is a setting of  {choices}"] if choices else [])])
