"""`wandb`: Weights & Biases. `trackers='[console,jsonl,{name: wandb, mode: offline}]'` needs no account."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from rlcore.errors import UserError, import_optional
from rlcore.protocols.tracker import RunInfo, SampleRecord, sample_table


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbConfig:
    """Destination of the run."""

    project: str = "rlcore"
    """Name of the W&B project."""
    entity: str = ""
    """User or team that owns the project; empty: the default of the account."""
    group: str = ""
    """Group of runs that belong together."""
    tags: tuple[str, ...] = ()
    """Tags of the run."""
    mode: Literal["", "online", "offline", "disabled"] = ""
    """Mode of W&B; empty: that of the environment variable WANDB_MODE, or else online."""


class WandbTracker:
    """Logs metrics under their names, samples as a table and histograms of all samples per step."""

    Config = WandbConfig

    def __init__(self, config: WandbConfig, run: RunInfo) -> None:
        self._wandb = import_optional("wandb", "tracker 'wandb'", "rlcore[wandb]")
        self._config, self._info = config, run
        self._run: Any = None

    def start(self, config: Mapping[str, object], *, resume_step: int | None) -> None:
        try:
            self._run = self._wandb.init(
                project=self._config.project,
                entity=self._config.entity or None,
                group=self._config.group or None,
                tags=list(self._config.tags) or None,
                name=self._info.name,
                id=self._id(resume_step),
                resume="allow",
                mode=self._config.mode or None,
                dir=str(self._info.directory),
                config=dict(config),
            )
        except self._wandb.Error as error:
            raise UserError(
                f"tracker 'wandb': {error}\n"
                "Type  wandb login     or  trackers='[console,jsonl,{name: wandb, mode: offline}]'"
            ) from error

    def _id(self, resume_step: int | None) -> str:
        """Return the W&B id, kept in the run's directory; a run that starts from scratch gets a new one."""
        file = self._info.directory / "wandb_id"
        if resume_step is None or not file.is_file():
            file.write_text(f"{self._info.name}-{secrets.token_hex(4)}")
        return file.read_text()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, samples: Sequence[SampleRecord]) -> None:
        columns, rows = sample_table(samples)
        table = self._wandb.Table(columns=columns, data=rows)
        self._run.log({"samples": table}, step=step)

    def log_distributions(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        histograms = {name: self._wandb.Histogram(found) for name, found in values.items() if len(found)}
        self._run.log({f"distribution/{name}": it for name, it in histograms.items()}, step=step)

    def finish(self, summary: Mapping[str, object]) -> None:
        if self._run is not None:
            self._run.summary.update({name: value for name, value in summary.items() if value is not None})
            self._run.finish()
            self._run = None
