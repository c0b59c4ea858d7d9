"""`manifest.json` of a checkpoint: the size and checksum of every file, so that a damaged checkpoint is never loaded."""

from __future__ import annotations

import json
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rlcore.data.recorded import flush

NAME = "manifest.json"
_CHUNK = 1 << 24
_THREADS = min(8, os.cpu_count() or 1)


def write_manifest(directory: Path, step: int) -> None:
    """Write the manifest of a checkpoint whose other files are complete, after these have reached the disk."""
    paths = [path for path in sorted(directory.rglob("*")) if path.is_file()]

    def entry(path: Path) -> dict[str, int | str]:
        flush(path)
        return {"bytes": path.stat().st_size, "crc32": _checksum(path)}

    with ThreadPoolExecutor(_THREADS) as pool:
        files = {str(path.relative_to(directory)): found for path, found in zip(paths, pool.map(entry, paths))}
    (directory / NAME).write_text(json.dumps({"step": step, "files": files}, indent=1))
    flush(directory / NAME)


def damage(path: Path, *, checksums: bool) -> str | None:
    """Return the problem of a checkpoint directory, or None if it is complete.

    Args:
        checksums: read every file, at about 3 GB/s for each core; otherwise only sizes are compared.
    """
    if not (path / NAME).is_file():
        return f"no {NAME}"
    try:
        return _damage(path, checksums=checksums)
    except OSError as error:  # such as a bad sector
        return f"{error.filename or 'a file'} cannot be read: {error.strerror}"


def _damage(path: Path, *, checksums: bool) -> str | None:
    try:
        manifest = json.loads((path / NAME).read_text())
        files = {str(name): _entry(found) for name, found in manifest["files"].items()}
        step = int(manifest["step"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{NAME} is broken: {error}"
    if "trainer.json" not in files:
        return f"{NAME} is broken: it has no trainer.json"
    for name, (size, _) in files.items():
        if not (path / name).is_file():
            return f"{name} is missing"
        if (found := (path / name).stat().st_size) != size:
            return f"{name} has {found} bytes instead of {size}"
    if checksums:
        with ThreadPoolExecutor(_THREADS) as pool:
            for name, now in zip(files, pool.map(_checksum, [path / it for it in files])):
                if (written := files[name][1]) and written != now:
                    return f"{name} has changed since it was written: its checksum is {now} instead of {written}"
    try:
        if (trained := int(json.loads((path / "trainer.json").read_text())["step"])) != step:
            return f"trainer.json is of step {trained}, and {NAME} of step {step}"
    except (ValueError, KeyError, TypeError) as error:
        return f"trainer.json is broken: {error}"
    return None


def _entry(found: int | dict[str, int | str]) -> tuple[int, str]:
    """Return size and checksum; manifests of earlier versions have only sizes."""
    return (found, "") if isinstance(found, int) else (int(found["bytes"]), str(found["crc32"]))


def _checksum(path: Path) -> str:
    """Return the CRC-32 of a file, which finds every change of up to 32 adjacent bits."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return f"{value:08x}"
