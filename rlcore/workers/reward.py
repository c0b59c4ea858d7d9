"""The reward worker: decodes samples and scores them in separate processes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from rlcore.controller.dispatch import dispatch
from rlcore.data.batch import Batch, object_array
from rlcore.data.columns import INTERNAL_COLUMNS, REWARD_PREFIX
from rlcore.models.load import load_tokenizer
from rlcore.protocols.environment import TIMEOUT
from rlcore.protocols.reward import SAMPLE_FIELDS, RewardSpec
from rlcore.protocols.worker import WorkerContext
from rlcore.rewards.executor import RewardExecutor
from rlcore.rewards.pipeline import Outcome, Status
from rlcore.workers.base import Worker
from rlcore.workers.plan import RunPlan

_STATUSES: tuple[Status, ...] = ("score", "skip", "timeout", "error")
_MAX_TEXT = 2000


class RewardWorker(Worker):
    """Scores samples with the run's rewards."""

    @classmethod
    def options_of(cls, plan: RunPlan, role: str) -> dict[str, Any]:
        config = plan.config
        return {
            "rewards": tuple(plan.rewards),
            "num_processes": config.reward.num_processes,
            "timeout_s": config.reward.timeout_s,
            "tokenizer_path": config.model.path,
        }

    def __init__(
        self,
        context: WorkerContext,
        *,
        rewards: Sequence[RewardSpec],
        num_processes: int,
        timeout_s: float,
        tokenizer_path: str,
    ) -> None:
        super().__init__(context)
        self._names = [spec.name for spec in rewards]
        self._tokenizer = load_tokenizer(tokenizer_path)
        self._one_at_a_time = threading.Lock()
        self._executor = RewardExecutor(rewards, num_processes=num_processes, timeout_s=timeout_s)

    @dispatch("dp", concurrent=True)
    def score(self, batch: Batch) -> Batch:
        """Compute the columns `reward` (NaN without a score), `reward:<name>`, `reward_status`, `reward_has_note`,
        `reward_note` and `completion`.

        With runtime=ray it runs beside the calls of other roles on this host. It is called ahead of the step that trains on
        the samples, while the next one may already be called in that step, so it runs one call after the other.
        """
        completions = self._completions(batch)
        results = self._results(self._samples(batch, completions))
        parts = {
            REWARD_PREFIX + name: torch.tensor([_number(r.parts.get(name)) for r in results], dtype=torch.float32)
            for name in self._names
        }
        return Batch.of(
            lengths=batch.lengths,
            rows={
                "reward": torch.tensor([_number(r.value) for r in results], dtype=torch.float32),
                "reward_status": torch.tensor([_STATUSES.index(r.status) for r in results], dtype=torch.int64),
                "reward_has_note": torch.tensor([bool(r.message or r.metrics) for r in results], dtype=torch.bool),
                "reward_note": object_array(
                    [[r.reward, r.message, dict(r.metrics)] if r.message or r.metrics else None for r in results]
                ),
                "completion": object_array(completions),
                **parts,
            },
        )

    @dispatch("dp")
    def examples(self, batch: Batch) -> list[dict[str, Any]]:
        """Return scored samples as plain dicts with long texts shortened, for logs and display."""
        names = [name for name in batch.columns if batch.level(name) != "token"]
        columns = {name: batch[name].tolist() for name in names}
        return [{name: _cut(columns[name][i]) for name in names} for i in range(len(batch))]

    def close(self) -> None:
        self._executor.close()

    def _results(self, samples: Sequence[dict[str, object]]) -> list[Outcome]:
        """Score the samples, except those of failed episodes, which never get a reward."""
        with self._one_at_a_time:
            scored = iter(self._executor.score([sample for sample in samples if not sample.get("episode_error")]))
        return [_failed(sample) if sample.get("episode_error") else next(scored) for sample in samples]

    def _completions(self, batch: Batch) -> list[str]:
        ids, mask, offsets = batch["input_ids"], batch["loss_mask"], batch.offsets().tolist()
        responses = [ids[a:b][mask[a:b]].tolist() for a, b in pairwise(offsets)]
        return list(self._tokenizer.batch_decode(responses, skip_special_tokens=True)) if responses else []

    def _samples(self, batch: Batch, completions: Sequence[str]) -> list[dict[str, object]]:
        names = [n for n in batch.columns if batch.level(n) != "token" and n not in INTERNAL_COLUMNS]
        columns: dict[str, list[Any]] = {name: batch[name].tolist() for name in names}
        columns |= {"completion": list(completions), "num_tokens": batch["num_loss_tokens"].tolist()}
        missing = [name for name in SAMPLE_FIELDS if name not in columns]
        assert not missing, f"samples without {missing}"
        return [dict(zip(columns, values)) for values in zip(*columns.values())]


def outcomes(scored: Batch) -> list[Outcome]:
    """Rebuild the outcomes from the columns of `score`; messages and extra metrics are fetched only if there are any."""
    reward, status, sample_id, prompt_id, noted = scored.fetch(
        "reward", "reward_status", "sample_id", "prompt_id", "reward_has_note"
    )
    notes = scored.fetch("reward_note") if bool(noted.any()) else [None] * len(scored)
    return [
        Outcome(
            status=_STATUSES[s],
            value=r if s == 0 else None,
            reward=failed,
            message=message,
            metrics=metrics,
            sample_id=sample,
            prompt_id=prompt,
        )
        for r, s, sample, prompt, note in zip(
            reward.tolist(), status.tolist(), sample_id.tolist(), prompt_id.tolist(), notes
        )
        for failed, message, metrics in [note or (None, None, {})]
    ]


def _failed(sample: dict[str, object]) -> Outcome:
    return Outcome(
        status="timeout" if sample["episode_end"] == TIMEOUT else "error",
        reward="environment",
        message=str(sample["episode_error"]),
        sample_id=sample["sample_id"],
        prompt_id=sample["prompt_id"],
    )


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _cut(value: Any) -> Any:
    if isinstance(value, str) and len(value) > _MAX_TEXT:
        return f"{value[: _MAX_TEXT // 2]} … {value[-_MAX_TEXT // 2 :]}"
    return value
