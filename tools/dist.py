"""Build wheels and sdists of all packages from the last commit: the same commit gives the same bytes.

    python tools/dist.py dist [PACKAGE…]        (make dist)

Every time in the files is that of the commit, and owners and permissions are not those of this machine. The packages are
built with the installed setuptools, whose version is part of the result.
"""

import argparse
import gzip
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = [".", *(f"plugins/{path.name}" for path in sorted((ROOT / "plugins").glob("rlcore-*")))]
_BUILD = "import sys; from setuptools import build_meta as b; out = sys.argv[1]; b.build_sdist(out); b.build_wheel(out)"


def main() -> None:
    parser = argparse.ArgumentParser(description="Build wheels and sdists of all packages from the last commit.")
    parser.add_argument("target", type=Path, help="directory for the files")
    parser.add_argument("packages", nargs="*", default=PACKAGES, help="folders of packages; default: all")
    options = parser.parse_args()
    for path in build(options.target.absolute(), options.packages):
        print(hashlib.sha256(path.read_bytes()).hexdigest(), path.name)


def build(target: Path, packages: list[str]) -> list[Path]:
    """Build packages into a directory and return the files."""
    target.mkdir(parents=True, exist_ok=True)
    seconds = int(_git("log", "-1", "--format=%ct"))
    built: list[Path] = []
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(_git("archive", "HEAD"))) as archive:
            archive.extractall(folder, filter="data")
        for package in packages:
            out = Path(folder) / "out" / package
            out.mkdir(parents=True)
            environment = {**os.environ, "SOURCE_DATE_EPOCH": str(seconds), "PYTHONHASHSEED": "0"}
            command = [sys.executable, "-c", _BUILD, str(out)]
            done = subprocess.run(
                command,
                cwd=Path(folder) / package,
                env=environment,
                capture_output=True,
                text=True,
                umask=0o022,
                check=False,
            )
            if done.returncode:
                raise SystemExit(f"{package} cannot be built:\n{done.stderr}")
            for path in sorted(out.glob("*.whl")) + sorted(out.glob("*.tar.gz")):
                data = path.read_bytes()
                built.append(target / path.name)
                built[-1].write_bytes(_plain(data, seconds) if path.suffix == ".gz" else data)
    return built


def _plain(data: bytes, seconds: int) -> bytes:
    """Return an sdist with sorted files, the same time for all of them, and no owners."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(data)) as old, tarfile.open(fileobj=packed, mode="w") as new:
        for member in sorted(old.getmembers(), key=lambda it: it.name):
            content = old.extractfile(member) if member.isfile() else None
            member.mtime, member.uid, member.gid, member.uname, member.gname = seconds, 0, 0, "", ""
            member.mode, member.pax_headers = 0o755 if member.isdir() else 0o644, {}
            new.addfile(member, content)
    return gzip.compress(packed.getvalue(), mtime=seconds)


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True).stdout


if __name__ == "__main__":
    main()
