"""`swanlab`: metrics, a table of samples and bar charts of rewards and lengths for every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from rlcore.errors import import_optional
from rlcore.protocols.tracker import RunInfo, SampleRecord, sample_table
from rlcore_trackers.identity import kept_id

_BINS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SwanLabConfig:
    """Destination of the run."""

    project: str = "rlcore"
    """Name of the project."""
    workspace: str = ""
    """User or organization; empty: that of the account."""
    group: str = ""
    """Group of runs that belong together."""
    tags: tuple[str, ...] = ()
    """Tags of the run."""
    mode: Literal["", "online", "local", "offline", "disabled"] = ""
    """Mode of SwanLab; empty: that of its environment variable, or else online."""


class SwanLabTracker:
    """Logs metrics under their names, and samples as a table per step."""

    Config = SwanLabConfig

    def __init__(self, config: SwanLabConfig, run: RunInfo) -> None:
        self._swanlab = import_optional("swanlab", "tracker 'swanlab'", "rlcore-trackers[swanlab]")
        self._config, self._info = config, run
        self._run: Any = None

    def start(self, config: Mapping[str, object], *, resume_step: int | None) -> None:
        """Open the run; a resumed one continues its entry."""
        file = self._info.directory / "swanlab_id"
        known = kept_id(file, resume_step)
        self._run = self._swanlab.init(
            project=self._config.project,
            workspace=self._config.workspace or None,
            name=self._info.name,
            group=self._config.group or None,
            tags=list(self._config.tags) or None,
            mode=self._config.mode or None,
            log_dir=str(self._info.directory / "swanlab"),
            config=dict(config),
            **({"id": known, "resume": "allow"} if known else {}),
        )
        file.write_text(str(self._run.id))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, samples: Sequence[SampleRecord]) -> None:
        columns, rows = sample_table(samples)
        table = self._swanlab.echarts.Table()
        table.add(columns, rows)
        self._run.log({"samples": table}, step=step)

    def log_distributions(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        for name, found in values.items():
            counts, edges = np.histogram(found, bins=_BINS)
            chart = self._swanlab.echarts.Bar()
            chart.add_xaxis([f"{edge:.4g}" for edge in edges[:-1]])
            chart.add_yaxis("samples", counts.tolist())
            self._run.log({f"distribution/{name}": chart}, step=step)

    def finish(self, summary: Mapping[str, object]) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            run.finish(*(("crashed", str(summary["error"])) if summary.get("error") else ()))
