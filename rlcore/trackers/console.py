"""`console`: a live display on a terminal, plain lines otherwise."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.logging import RichHandler

from rlcore.protocols.tracker import RunInfo, SampleRecord
from rlcore.trackers import display
from rlcore.trackers.display import State, line, panel

_REFRESH_S = 0.25
_MAX_LINES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleConfig:
    """Display settings."""

    live: bool = True
    """False prints plain lines on a terminal, too."""


class ConsoleTracker:
    """Display that is redrawn at phase changes and after steps, at most four times a second, without a thread."""

    Config = ConsoleConfig

    def __init__(self, config: ConsoleConfig, run: RunInfo, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, force_jupyter=False)
        self._state = State(run.name, run.total_steps, run.shows)
        self._every = max(1, run.total_steps // _MAX_LINES)
        wants_live = config.live and self._console.is_terminal and not self._console.is_dumb_terminal
        self._live = Live(console=self._console, auto_refresh=False, transient=True) if wants_live else None
        self._handler: logging.Handler | None = None
        self._start = time.monotonic()
        self._drawn = 0.0
        self._finished = False

    def start(self, config: Mapping[str, object], *, resume_step: int | None) -> None:
        self._state.step = resume_step or 0
        self._start = time.monotonic()
        if self._live is not None:
            self._live.start()
            self._handler = RichHandler(console=self._console, show_path=False)
            logging.getLogger().addHandler(self._handler)

    def phase(self, name: str) -> None:
        """Show the phase of the run."""
        self._state.phase = name
        self._draw()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._state.elapsed_s = time.monotonic() - self._start
        self._state.add(step, metrics)
        if self._live is not None:
            self._draw()
        elif step % self._every == 0 or step == self._state.total_steps or "eval/pass_rate" in metrics:
            self._console.print(line(self._state), markup=False, soft_wrap=True)

    def log_samples(self, step: int, samples: Sequence[SampleRecord]) -> None:
        if samples:
            self._state.sample = samples[step % len(samples)]

    def finish(self, summary: Mapping[str, object]) -> None:
        if self._finished:
            return
        self._finished = True
        if self._live is not None:
            self._live.stop()
            self._console.print(panel(self._state, min(100, self._console.width)))
        if self._handler is not None:
            logging.getLogger().removeHandler(self._handler)
        self._console.print(display.summary(summary))

    def _draw(self) -> None:
        now = time.monotonic()
        if self._live is None or now - self._drawn < _REFRESH_S:
            return
        self._drawn = now
        self._state.elapsed_s = now - self._start
        self._live.update(panel(self._state, min(100, self._console.width)), refresh=True)
