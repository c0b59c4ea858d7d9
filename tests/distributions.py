"""Installed distributions for tests: a .dist-info folder and its module, as pip installs them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlcore.testing.waiting import HANG_S

REWARD = "def score(completion):\n    return float(len(completion))\n"


def plant(
    site: Path,
    package: str,
    points: Mapping[str, Mapping[str, str]],
    *,
    version: str = "1.0",
    requires: Sequence[str] = ("rlcore>=0.1",),
    code: Mapping[str, str] | None = None,
) -> Path:
    """Install a distribution in the folder `site`; returns `site`.

    Args:
        points: kind -> name -> target, such as {"reward": {"length": "pkg:score"}}.
        code: module -> source; "pkg.sub" makes the package pkg with the module sub.
    """
    info = site / f"{package.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {package}", f"Version: {version}"]
    (info / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {it}" for it in requires)]) + "\n")
    groups = [
        "\n".join([f"[rlcore.{kind}]", *(f"{name} = {target}" for name, target in named.items())])
        for kind, named in points.items()
    ]
    (info / "entry_points.txt").write_text("\n\n".join(groups) + "\n")
    for module, source in (code or {}).items():
        write_module(site, module, source)
    return site


def write_module(site: Path, module: str, source: str) -> None:
    """Write a module; its parents become packages."""
    *parents, name = module.split(".")
    folder = site
    for parent in parents:
        folder = folder / parent
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").touch()
    site.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(source)


def environment(*sites: Path, **variables: str) -> dict[str, str]:
    """Return the environment of a child process with these folders first on its path."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("RLCORE_")},
        "PYTHONPATH": os.pathsep.join([*map(str, sites), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
        **variables,
    }


def rlcore(
    *arguments: str, sites: Sequence[Path] = (), cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the command `rlcore` in a separate process."""
    return subprocess.run(
        [sys.executable, "-m", "rlcore", *arguments],
        env=environment(*sites, **variables),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
