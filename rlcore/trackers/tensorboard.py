"""`tensorboard`: metrics as scalars, samples as text, in the run's directory under tensorboard/."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlcore.errors import UserError
from rlcore.protocols.tracker import RunInfo, SampleRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBoardConfig:
    """Nothing to set."""


class TensorBoardTracker:
    """See it with  tensorboard --logdir outputs"""

    Config = TensorBoardConfig

    def __init__(self, config: TensorBoardConfig, run: RunInfo) -> None:
        try:
            import torch.utils.tensorboard  # noqa: F401
        except ImportError as error:
            raise UserError(
                "tracker 'tensorboard' needs the Python package 'tensorboard', which is not installed:\n"
                "    pip install 'rlcore[tensorboard]'"
            ) from error
        self._directory = run.directory / "tensorboard"
        self._writer: Any = None

    def start(self, config: Mapping[str, object], *, resume_step: int | None) -> None:
        """Hides what an earlier run of this name logged, or the abandoned part after the checkpoint of a resume."""
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
