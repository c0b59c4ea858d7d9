"""`Transcript`: the tokens of one sample with their log-probs and versions; `transcripts_batch` makes rows of them.

Both single responses and episodes with several turns are built here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from rlcore.data.batch import Batch
from rlcore.types import FinishReason, Sample


@dataclass(slots=True, kw_only=True)
class Transcript:
    """A sample under construction.

    Example:
        >>> transcript = Transcript()
        >>> transcript.read([5, 9])
        >>> transcript.write(Sample(request_id=0, token_ids=[7], log_probs=[-0.5], finish_reason="stop", policy_version=3))
        >>> transcript.loss_mask
        [False, False, True]
    """

    token_ids: list[int] = field(default_factory=list)
    spans: list[tuple[bool, int]] = field(default_factory=list)
    """(written by the model, number of tokens), in order."""
    log_probs: list[float] = field(default_factory=list)
    """Log-probabilities from the engine, for the model's tokens."""
    versions: list[int] = field(default_factory=list)
    """Versions of the weights that sampled each of the model's tokens."""
    finish_reason: FinishReason = "abort"
    """Finish reason of the last response."""
    policy_version: int = 0
    """Policy version of the last response."""

    @property
    def first_version(self) -> int:
        """Lowest version that sampled one of the model's tokens; `policy_version` if there are none."""
        return min(self.versions, default=self.policy_version)

    @property
    def loss_mask(self) -> list[bool]:
        """True where the model wrote the token."""
        return [written for written, count in self.spans for _ in range(count)]

    def read(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the model reads."""
        self.token_ids += token_ids
        self.spans.append((False, len(token_ids)))

    def write(self, sample: Sample) -> None:
        """Append a response of the model."""
        count = len(sample.token_ids)
        self.token_ids += sample.token_ids
        self.spans.append((True, count))
        self.log_probs += sample.log_probs
        self.versions += sample.token_versions or [sample.policy_version] * count
        self.finish_reason, self.policy_version = sample.finish_reason, sample.policy_version


def transcripts_batch(prompts: Batch, samples_per_prompt: int, transcripts: Sequence[Transcript], **rows: Any) -> Batch:
    """Return one row per transcript.

    Args:
        prompts: one row per transcript; the row columns are kept.
        samples_per_prompt: number of transcripts of one prompt, which are adjacent.
        rows: additional row columns; they replace columns of the same name.
    """
    number = torch.arange(len(transcripts)) % samples_per_prompt
    own = {
        "sample_id": prompts["group_id"] * samples_per_prompt + number,
        "policy_version": torch.tensor([it.policy_version for it in transcripts], dtype=torch.int64),
        "first_version": torch.tensor([it.first_version for it in transcripts], dtype=torch.int64),
        "num_loss_tokens": torch.tensor([len(it.log_probs) for it in transcripts], dtype=torch.int64),
        "truncated": torch.tensor([it.finish_reason == "length" for it in transcripts], dtype=torch.bool),
        "finish_reason": [it.finish_reason for it in transcripts],
    }
    spans = _column((it.spans for it in transcripts), torch.int64).reshape(-1, 2)
    mask = spans[:, 0].bool().repeat_interleave(spans[:, 1])
    log_probs, versions = torch.zeros(len(mask)), torch.full((len(mask),), -1)
    log_probs[mask] = _column((it.log_probs for it in transcripts), torch.float32)
    versions[mask] = _column((it.versions for it in transcripts), torch.int64)
    kept = {name: prompts[name] for name in prompts.columns if prompts.level(name) != "token"}
    return Batch.of(
        lengths=[len(it.token_ids) for it in transcripts],
        tokens={
            "input_ids": _column((it.token_ids for it in transcripts), torch.int64),
            "loss_mask": mask,
            "rollout_log_probs": log_probs,
            "token_version": versions,
        },
        rows={**kept, **own, **rows},
    )


def _column(parts: Iterable[Sequence[Any]], dtype: torch.dtype) -> Tensor:
    return torch.tensor(list(chain.from_iterable(parts)), dtype=dtype)
