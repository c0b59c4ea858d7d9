"""Installed distributions for tests: a .dist-info folder and the modules that it points to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

REWARD = "def score(completion):\n    return float(len(completion))\n"


def plant(
    site: Path,
    package: str,
    points: Mapping[str, Mapping[str, str]],
    *,
    requires: Sequence[str] = ("rlcore>=0.1",),
    code: Mapping[str, str] | None = None,
) -> None:
    """Install version 1.0 of a distribution in the folder `site`.

    Args:
        points: kind -> name -> target, such as {"reward": {"length": "pkg:score"}}.
        code: module -> source; "pkg.sub" makes the package pkg with the module sub.
    """
    info = site / f"{package.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    head = f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
    (info / "METADATA").write_text(head + "".join(f"Requires-Dist: {it}\n" for it in requires))
    lines = []
    for kind, named in points.items():
        lines += [f"[rlcore.{kind}]", *(f"{name} = {target}" for name, target in named.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    for module, source in (code or {}).items():
        write_module(site, module, source)


def write_module(site: Path, module: str, source: str) -> None:
    """Write a module; its parents become packages without code."""
    file = site.joinpath(*module.split(".")).with_suffix(".py")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source)
