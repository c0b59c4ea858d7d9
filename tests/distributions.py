"""Installed distributions for tests: a .dist-info folder and its module, as pip installs them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
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


def call(*command: object, cwd: Path | None = None, timeout: float = HANG_S) -> str:
    """Run a command that must succeed and return its output."""
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
_NOT_PACKAGED = shutil.ignore_patterns(
    ".*", "__pycache__", "*.egg-info", "build", "outputs", "plugins", "tests", "examples"
)


def build_wheels(folders: Sequence[Path], home: Path) -> list[Path]:
    """Build wheels of packages from copies, in `home / "wheels"`."""
    sources = [home / "source" / str(number) for number in range(len(folders))]
    for folder, source in zip(folders, sources, strict=True):
        shutil.copytree(folder, source, ignore=_NOT_PACKAGED)
    call(*PIP, "wheel", "--no-index", "--no-deps", "--no-build-isolation", "-w", home / "wheels", *sources)
    wheels = sorted((home / "wheels").glob("*.whl"))
    assert len(wheels) == len(folders)
    return wheels


def make_environment(home: Path) -> Path:
    """Make an empty virtual environment in `home` and return its Python."""
    call(sys.executable, "-m", "venv", "--without-pip", home / "venv")
    return home / "venv" / "bin" / "python"


def add_third_party(home: Path) -> None:
    """Add the installed packages to the virtual environment in `home`, except those of this tree."""
    third_party = home / "third-party"
    third_party.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "rlcore" not in entry.name and entry.suffix != ".pth" and entry.name != "__pycache__":
            (third_party / entry.name).symlink_to(entry)
    (site,) = home.glob("venv/lib/*/site-packages")
    (site / "third-party.pth").write_text(f"{third_party}\n")
