"""Generate rlcore/registry/known.json and known_settings.json from the plugins:  python docs/make_known.py

The core uses them to name the package of a plugin that is not installed, and the plugins that have a setting.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "rlcore" / "registry" / "known.json"
PREFIX = "rlcore."


def known(plugins: Path = ROOT / "plugins") -> str:
    """Return the index of a folder of packages as JSON: kind -> name -> package.

    Raises:
        ValueError: two packages register the same name.
    """
    index: dict[str, dict[str, str]] = {}
    for file in sorted(plugins.glob("*/pyproject.toml")):
        project = tomllib.loads(file.read_text())["project"]
        for group, points in project.get("entry-points", {}).items():
            names = index.setdefault(group.removeprefix(PREFIX), {}) if group.startswith(PREFIX) else {}
            if twice := sorted(points.keys() & names.keys()):
                raise ValueError(f"{file}: {group} '{twice[0]}' belongs to {names[twice[0]]}\nRename one of them.")
            names |= dict.fromkeys(points, project["name"])
    return json.dumps(index, indent=2, sort_keys=True) + "\n"


def known_settings(root: Path = ROOT) -> str:
    """Return the settings of all plugins that a section chooses, as JSON: section -> setting -> names of plugins."""
    found: dict[str, dict[str, list[str]]] = {}
    sys.path += [str(root), *map(str, root.glob("plugins/*/src"))]
    for file in [root / "pyproject.toml", *sorted(root.glob("plugins/*/pyproject.toml"))]:
        points = tomllib.loads(file.read_text())["project"].get("entry-points", {})
        for section in ("algorithm", "backend", "environment", "rollout"):
            for name, target in points.get(PREFIX + section, {}).items():
                module, _, attribute = target.partition(":")
                config = getattr(getattr(importlib.import_module(module), attribute), "Config", None)
                for field in dataclasses.fields(config) if config and name != "fake" else ():
                    found.setdefault(section, {}).setdefault(field.name, []).append(name)
    return json.dumps(found, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    TARGET.write_text(known())
    TARGET.with_name("known_settings.json").write_text(known_settings())
    print(f"wrote {TARGET} and known_settings.json")
