"""Checkpoints, written under a temporary name and renamed, so that each one is complete.

    run/checkpoints/step_000050/
      actor/ critic/          files of their backends: safetensors in Hugging Face layout, optimizer state, step
      trainer.json            step, loader and ledger, algorithm state, counters, versions of plugins
      manifest.json           every file with its size and checksum, written last
    run/checkpoints/best      link to the one that checkpoint.keep_best keeps

A directory without a manifest, or whose files do not match it, is damaged and never loaded; see manifest.py.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rlcore.data.recorded import flush
from rlcore.errors import ConfigError, InfrastructureError, RlcoreError, RunError, UserError
from rlcore.trainer.manifest import damage, write_manifest

logger = logging.getLogger(__name__)
_PREFIX = "step_"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    step: int
    path: Path
    state: Mapping[str, Any]
    """Contents of trainer.json."""


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, directory: Path, keep_last: int) -> None:
        self.directory = directory
        self.writing: int | None = None
        """Step of the checkpoint that is being written."""
        self._keep_last = keep_last

    def begin(self, step: int, state: Mapping[str, Any], save_roles: Callable[[Path], None]) -> None:
        """Begin a checkpoint in a temporary directory; `complete` adds it to the others.

        Raises:
            RunError: it cannot be written. The text, or a note on any other error, names the last good checkpoint.
        """
        with self._or_nothing(step) as temporary:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            save_roles(temporary)
            (temporary / "trainer.json").write_text(json.dumps(state, indent=1))
        self.writing = step

    def complete(self, finish_roles: Callable[[Path], None], best: int = 0) -> Checkpoint:
        """Wait for the files that `begin` started to write and rename the directory. Raises the same as `begin`.

        Args:
            best: step whose checkpoint is kept under the name `best`, too; 0: none.
        """
        assert self.writing is not None, "no checkpoint has begun"
        step, self.writing = self.writing, None
        final = self.directory / f"{_PREFIX}{step:06d}"
        with self._or_nothing(step) as temporary:
            finish_roles(temporary)
            write_manifest(temporary, step)
            shutil.rmtree(final, ignore_errors=True)
            temporary.rename(final)
            flush(self.directory)
            if step == best:
                link = self.directory / ".best.writing"
                link.unlink(missing_ok=True)
                link.symlink_to(final.name)
                link.replace(self.directory / "best")
        self._forget_before(step, best)
        return _read(final)

    @contextmanager
    def _or_nothing(self, step: int) -> Iterator[Path]:
        """Yield the directory to write in; after an error, remove it and name the last good checkpoint."""
        from safetensors import SafetensorError  # raised when the disk is full

        temporary = self.directory / f".{_PREFIX}{step:06d}.writing"
        try:
            yield temporary
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            last = self.latest()
            good = f"The last complete one is {last.path}" if last else "There is no earlier one"
            what = f"checkpoint of step {step} could not be written"
            if isinstance(error, RlcoreError) or not isinstance(error, OSError | SafetensorError):
                error.add_note(f"{what}. {good}.")
                raise
            if isinstance(error, OSError) and error.errno not in _FULL:
                raise InfrastructureError(
                    f"{what}: {error}\n{good}; type the same command to resume from it."
                ) from error
            raise RunError(f"{what}: {error}\n{good}; free space there and resume.") from error

    def latest(self) -> Checkpoint | None:
        """Return the newest complete checkpoint, by the sizes of its files; others are skipped with a warning."""
        return newest(self.directory)

    def sweep(self, step: int | None = None) -> None:
        """Remove directories that a killed process left half written or half removed.

        Args:
            step: the checkpoint from which the run resumes. Later ones are damaged and get the ending `.damaged`.
        """
        for ending in ("writing", "removing"):
            for path in self.directory.glob(f".{_PREFIX}*.{ending}"):
                shutil.rmtree(path)
        later = [] if step is None else [it for it in checkpoint_paths(self.directory) if int(_step(it)) > step]
        if any((self.directory / "best").resolve() == path for path in later):
            (self.directory / "best").unlink()
        for path in later:
            damaged = _unused(path.with_name(f"{path.name}.damaged"))
            logger.warning("%s is damaged: it is now %s", path, path.rename(damaged).name)

    def set_aside(self) -> None:
        """Rename the checkpoints of an earlier run of the same name, so that a new run does not mix with them."""
        if not checkpoint_paths(self.directory):
            return
        old = self.directory.rename(_unused(self.directory.with_name(f"{self.directory.name}.1")))
        logger.warning("the checkpoints of an earlier run are now in %s", old)

    def _forget_before(self, step: int, best: int = 0) -> None:
        """Keep this checkpoint, the last few before it and the best. Later ones are damaged, so they are not counted."""
        earlier = [path for path in checkpoint_paths(self.directory) if int(_step(path)) < step]
        earlier = [path for path in earlier if int(_step(path)) != best]
        older = [path for path in earlier if damage(path, checksums=False) is None]
        for path in older[: max(0, len(older) - self._keep_last + 1)]:
            shutil.rmtree(path.rename(path.with_name(f".{path.name}.removing")))  # after a kill, `sweep` removes it


def newest(directory: Path, *, checksums: bool = False) -> Checkpoint | None:
    """Return the newest complete checkpoint of a directory; damaged ones are skipped with a warning.

    Args:
        checksums: compare the contents of all files, for a checkpoint that will be loaded.
    """
    for path in reversed(checkpoint_paths(directory)):
        problem = damage(path, checksums=checksums)
        if problem is None:
            return _read(path)
        logger.warning("%s is not complete (%s); trying an earlier one", path, problem)
    return None


def checkpoint_paths(directory: Path) -> list[Path]:
    """Return the checkpoint directories, complete or not, sorted by step."""
    return sorted((it for it in directory.glob(f"{_PREFIX}*") if _step(it).isdigit()), key=lambda it: int(_step(it)))


def hold(directory: Path) -> TextIO:
    """Create a run's directory and lock it until the file is closed or this process ends.

    Raises:
        ConfigError: it cannot be created, or another process trains there.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / ".lock").open("w")
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written: {error.strerror}\nType  run.directory=DIR") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise ConfigError(f"another process is training in {directory}\nWait for it, or type  run.name=NAME") from error
    return file


def _unused(path: Path) -> Path:
    """Return a path that does not exist, with a higher number if this one does: checkpoints.1, .2; damaged, damaged.1."""
    while path.exists():
        stem, _, number = path.name.rpartition(".")
        path = path.with_name(f"{stem}.{int(number) + 1}" if number.isdigit() else f"{path.name}.1")
    return path


def _step(path: Path) -> str:
    return path.name.removeprefix(_PREFIX)


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint directory that will be loaded.

    Raises:
        UserError: it is missing, incomplete or damaged.
    """
    if problem := damage(path, checksums=True):
        raise UserError(f"{path} is not a complete checkpoint: {problem}\nComplete ones:  ls {path.parent}")
    return _read(path)


def _read(path: Path) -> Checkpoint:
    state = json.loads((path / "trainer.json").read_text())
    return Checkpoint(step=int(state["step"]), path=path, state=state)
