"""`trackio`: metrics, a table of samples and histograms of rewards and lengths for every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlcore.errors import import_optional
from rlcore.protocols.tracker import RunInfo, SampleRecord, sample_table


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackioConfig:
    """Destination of the run."""

    project: str = "rlcore"
    """Name of the project."""
    group: str = ""
    """Group of runs that belong together."""
    space_id: str = ""
    """Space that receives the run, such as "NAME/SPACE"; empty: this machine, where `trackio show` displays it."""


class TrackioTracker:
    """Logs metrics under their names, and samples as a table per step."""

    Config = TrackioConfig

    def __init__(self, config: TrackioConfig, run: RunInfo) -> None:
        self._trackio = import_optional("trackio", "tracker 'trackio'", "rlcore-trackers[trackio]")
        self._config, self._info = config, run
        self._run: Any = None

    def start(self, config: Mapping[str, object], *, resume_step: int | None) -> None:
        """Open the run; a resumed one continues the entry of its name."""
        self._run = self._trackio.init(
            project=self._config.project,
            name=self._info.name,
            group=self._config.group or None,
            space_id=self._config.space_id or None,
            config=dict(config),
            resume="never" if resume_step is None else "allow",
            embed=False,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, samples: Sequence[SampleRecord]) -> None:
        columns, rows = sample_table(samples)
        table = self._trackio.Table(columns=columns, data=rows)
        self._run.log({"samples": table}, step=step)

    def log_distributions(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        histograms = {name: self._trackio.Histogram(found.tolist()) for name, found in values.items() if len(found)}
        self._run.log({f"distribution/{name}": it for name, it in histograms.items()}, step=step)

    def finish(self, summary: Mapping[str, object]) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            run.finish()
