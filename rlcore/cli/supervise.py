"""`rlcore train … --supervise`: run the training as a child process, and start it again when the infrastructure failed.

A run resumes from its last checkpoint, bit for bit, so a restart costs only time. The child writes one byte to say
that it exited on its own; without it, the kernel or a library has ended the process, and its exit code means nothing.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from rlcore.cli.ending import FAILED, REPORT, RETRY

if TYPE_CHECKING:
    from rlcore.config.schema import RecoveryConfig

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def supervise(arguments: Sequence[str], directory: Path, recovery: RecoveryConfig) -> int:
    """Run `rlcore train` with arguments that name the run in `directory`; return the exit code of the last try."""
    command = [sys.executable, "-m", "rlcore", "train", *arguments]
    before: tuple[int, int] | None = None
    restarts: list[float] = []
    with _Child() as child:
        while True:
            code, by_itself = child.run(command)
            if child.signal or (by_itself and code != RETRY):
                return code if code >= 0 else 128 - code
            how, step = _describe(code, by_itself), _last_step(directory)
            if (code, step) == before and code != RETRY:
                return _end(f"step {step + 1} has failed twice in the same way ({how})", directory, FAILED)
            before, now = (code, step), time.monotonic()
            restarts = [it for it in restarts if now - it < recovery.window_s]
            if len(restarts) >= recovery.max_restarts:
                spent = (
                    f"{len(restarts)} restarts in {recovery.window_s:g} s (recovery.max_restarts, recovery.window_s)"
                )
                return _end(f"the run died after step {step} ({how}), after {spent}", directory, RETRY)
            delay_s = recovery.delay_s * 2 ** len(restarts)
            restarts.append(now)
            number = f"restart {len(restarts)} of at most {recovery.max_restarts} in {recovery.window_s:g} s"
            text = f"supervise: the run died after step {step} ({how}); {number}, after {delay_s:g} s"
            print(text, file=sys.stderr, flush=True)
            if not child.wait(delay_s):
                return 128 + child.signal
            command = [*command, "run.resume=auto"] if "run.resume=auto" not in command else command


class _Child:
    """A child process that gets the signals of this one."""

    def __init__(self) -> None:
        self.signal = 0
        """Number of the last signal, or 0."""
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> _Child:
        self._handlers = {number: signal.signal(number, self._forward) for number in _FORWARDED}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def run(self, command: Sequence[str]) -> tuple[int, bool]:
        """Return the exit code, or minus the signal that ended it, and whether the command ended by itself."""
        with _pipe() as (read, write):
            # in a session of its own, it gets the signals of the terminal once, from here
            self._process = subprocess.Popen(
                command, pass_fds=[write], env=os.environ | {REPORT: str(write)}, start_new_session=True
            )
            if self.signal:  # it arrived before this process could get it
                self._forward(self.signal, None)
            code = self._process.wait()
            try:
                return code, bool(os.read(read, 1))
            except BlockingIOError:
                return code, False

    def wait(self, seconds: float) -> bool:
        """Wait, and return whether no signal has arrived."""
        end = time.monotonic() + seconds
        while not self.signal and time.monotonic() < end:
            time.sleep(min(0.1, seconds))
        return not self.signal

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number if number == signal.SIGINT else signal.SIGTERM)


@contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    os.set_blocking(read, False)
    try:
        yield read, write
    finally:
        os.close(read)
        os.close(write)


def _describe(code: int, by_itself: bool) -> str:
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return "infrastructure failure" if by_itself else f"exit code {code} of a library"


def _last_step(directory: Path) -> int:
    """Return the last step in metrics.jsonl, or else of a checkpoint; 0 if there is none."""
    from rlcore.trainer.checkpoint import newest

    try:
        complete = (directory / "metrics.jsonl").read_text().rpartition("\n")[0]
        return int(json.loads(complete.rpartition("\n")[2])["step"])
    except (OSError, ValueError, KeyError):
        latest = newest(directory / "checkpoints")
        return latest.step if latest else 0


def _end(problem: str, directory: Path, code: int) -> int:
    again = f"rlcore train {shlex.quote(str(directory))} --supervise"
    print(f"error: {problem}\nThe errors are above; to continue:  {again}", file=sys.stderr)
    return code
