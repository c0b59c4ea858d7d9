"""`tensorboard`: metrics as scalars and samples as text, in tensorboard/ of the run's directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlcore.errors import import_optional
from rlcore.protocols.tracker import RunInfo, SampleRecord


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
        for i, sample in enumerate(samples):
            self._writer.add_text(
                f"sample/{i}", f"    {sample.prompt}\n    → {sample.completion}\n    {sample.reward}", step
            )

    def finish(self, summary: Mapping[str, object]) -> None:
        if self._writer is not None:
            self._writer.close()
