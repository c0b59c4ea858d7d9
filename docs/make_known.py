"""Generate rlcore/registry/known.json from the entry points of the plugins:  python docs/make_known.py

The core uses this index to name the package of a plugin that is not installed.
"""

from __future__ import annotations

import json
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


if __name__ == "__main__":
    TARGET.write_text(known())
    print(f"wrote {TARGET}")
