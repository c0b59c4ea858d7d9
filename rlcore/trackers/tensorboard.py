"""`tensorboard`: metrics as scalars, samples as tables, and histograms, in tensorboard/ of the run's directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlcore.errors import import_optional
from rlcore.protocols.tracker import RunInfo, SampleRecord, sample_table


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBoardConfig:
    """No settings."""


class TensorBoardTracker:
    """Event files for TensorBoard:  tensorboard --logdir outputs"""

    Config = TensorBoardConfig

    def __init__(self, config: TensorBoardConfig, run: RunInfo) -> None:
        import_optional("tensorboard", "tracker 'tensorboard'", "rlcore[tensorboard]")
        self._directory = run.directory / "tensorboard"
        self._writer: Any = None

    def start(self, config: Mapping[str, object], *, resume_step: int | None) -> None:
        """Open the writer and hide entries of an earlier run with this name, or after a resume's checkpoint."""
        from torch.utils.tensorboard import SummaryWriter

        abandoned = 0 if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(str(self._directory), purge_step=abandoned)
        self._writer.add_text("config", "\n".join(f"    {name}: {value}" for name, value in config.items()))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def log_samples(self, step: int, samples: Sequence[SampleRecord]) -> None:
        columns, rows = sample_table(samples)
        lines = [columns, ["---"] * len(columns), *([_cell(value) for value in row] for row in rows)]
        self._writer.add_text("samples", "\n".join(f"| {' | '.join(line)} |" for line in lines), step)

    def log_distributions(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        for name, found in values.items():
            if len(found):
                self._writer.add_histogram(f"distribution/{name}", found, step)

    def finish(self, summary: Mapping[str, object]) -> None:
        if self._writer is not None:
            self._writer.close()


def _cell(value: object) -> str:
    """Return text for a cell of a Markdown table."""
    return str(value).replace("|", "\\|").replace("\n", "⏎")
