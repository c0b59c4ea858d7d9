"""Checkpoints: written beside and renamed, complete or not there.

    run/checkpoints/step_000050/
      actor/ critic/          what their backends write: safetensors in Hugging Face layout, optimiser, step
      trainer.json            step, loader and ledger, algorithm state, counters, versions of plugins
      manifest.json           every file with its size, written last

A directory without a manifest, or whose files do not match it, is no checkpoint and is never loaded.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcore.errors import RunError, UserError

logger = logging.getLogger(__name__)
_PREFIX = "step_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    step: int
    path: Path
    state: Mapping[str, Any]
    """trainer.json."""


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, directory: Path, keep_last: int) -> None:
        self.directory = directory
        self._keep_last = keep_last

    def write(self, step: int, state: Mapping[str, Any], save_roles: Callable[[Path], None]) -> Path:
        """Write a checkpoint; until the last rename the earlier ones are untouched.

        Raises:
            RunError: it could not be written, on a full disk for instance; says which checkpoint is still good.
        """
        final = self.directory / f"{_PREFIX}{step:06d}"
        temporary = self.directory / f".{final.name}.writing"
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            save_roles(temporary)
            _write_json(temporary / "trainer.json", state)
            sizes = {
                str(p.relative_to(temporary)): p.stat().st_size for p in sorted(temporary.rglob("*")) if p.is_file()
            }
            for name in sizes:
                _flush(temporary / name)
            _write_json(temporary / "manifest.json", {"step": step, "files": sizes})
            shutil.rmtree(final, ignore_errors=True)
            temporary.rename(final)
            _flush(self.directory)
        except Exception as error:
            shutil.rmtree(temporary, ignore_errors=True)
            last = self.latest()
            good = f"The last good one is {last.path}" if last else "There is no earlier one"
            raise RunError(
                f"checkpoint of step {step} could not be written: {error}\n{good}; free space there and resume."
            ) from error
        self._forget_before(step)
        return final

    def latest(self) -> Checkpoint | None:
        """The newest complete checkpoint; damaged ones are passed over with a warning."""
        for path in reversed(self._paths()):
            problem = damage(path)
            if problem is None:
                return read_checkpoint(path)
            logger.warning("%s is not complete (%s); looking for an earlier one", path, problem)
        return None

    def set_aside(self) -> None:
        """A run that starts anew leaves the checkpoints of an earlier run of its name, under another name."""
        if not self._paths():
            return
        number = 1
        while (old := self.directory.with_name(f"{self.directory.name}.{number}")).exists():
            number += 1
        self.directory.rename(old)
        logger.warning("the checkpoints of an earlier run are now in %s", old)

    def _paths(self) -> list[Path]:
        """Checkpoint directories, complete or not, by step."""
        paths = [path for path in self.directory.glob(f"{_PREFIX}*") if _step(path).isdigit()]
        return sorted(paths, key=lambda path: int(_step(path)))

    def _forget_before(self, step: int) -> None:
        """Keep this one and the last few before it; a later one is damaged and counts for nothing."""
        older = [path for path in self._paths() if int(_step(path)) < step]
        for path in older[: max(0, len(older) - self._keep_last + 1)]:
            shutil.rmtree(path)


def _step(path: Path) -> str:
    return path.name.removeprefix(_PREFIX)


def read_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint directory as an object.

    Raises:
        UserError: it is not there or not complete.
    """
    problem = damage(path)
    if problem is not None:
        raise UserError(f"{path} is not a complete checkpoint: {problem}\nComplete ones:  ls {path.parent}")
    state = json.loads((path / "trainer.json").read_text())
    return Checkpoint(step=int(state["step"]), path=path, state=state)


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint directory, or None."""
    manifest = path / "manifest.json"
    if not manifest.is_file():
        return "no manifest.json"
    try:
        files = json.loads(manifest.read_text())["files"]
    except (ValueError, KeyError) as error:
        return f"manifest.json is broken: {error}"
    for name, size in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}"
    return None


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=1))
    _flush(path)


def _flush(path: Path) -> None:
    """Force a file or directory to the disk, so that a rename never precedes its data."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
