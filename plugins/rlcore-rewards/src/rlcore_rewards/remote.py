"""A reward over HTTP. Samples are sent in batches, as objects with the data columns listed in `columns`.

POST url   {"samples": [{"completion": "…", "prompt": "…", "answer": "…"}, …]}
response   {"scores": [1.0, null, {"score": 0.5, "metrics": {"format": 1.0}}, …]}        null: does not apply
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlcore.errors import SampleError, require_at_least
from rlcore.protocols.reward import RewardResult
from rlcore_rewards.client import Client, ServerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteConfig(ServerConfig):
    """Options of `remote`."""

    columns: tuple[str, ...] = ()
    """Columns of the data to send, in addition to completion, prompt, num_tokens and finish_reason."""
    batch_size: int = 16
    """Maximum number of samples in one request."""
    gather_s: float = 0.01
    """Time that a request waits for more samples."""

    def __post_init__(self) -> None:
        ServerConfig.__post_init__(self)
        require_at_least(self, batch_size=1, gather_s=0)


class Remote:
    """Reward from an HTTP server.

    Example: rlcore train reward='[{name: remote, url: "http://localhost:8000/score", columns: [answer]}]'
    """

    Config = RemoteConfig

    def __init__(self, config: RemoteConfig) -> None:
        self._config = config
        self._columns = tuple(config.columns)
        self.required_columns = self._columns
        self._client = Client(config, "reward")
        self._waiting: list[tuple[dict[str, Any], asyncio.Future[Any]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._sending: set[asyncio.Task[None]] = set()

    async def __call__(
        self, completion: str, prompt: Any, num_tokens: int, finish_reason: str, **columns: Any
    ) -> RewardResult:
        """Add the sample to the next batch, and wait for its score."""
        sample = {"completion": completion, "prompt": prompt, "num_tokens": num_tokens, "finish_reason": finish_reason}
        sample |= {name: columns[name] for name in self._columns}
        _check_json(sample)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        self._waiting.append((sample, answer))
        if len(self._waiting) >= self._config.batch_size:
            self._flush()
        elif self._timer is None:
            self._timer = loop.call_later(self._config.gather_s, self._flush)
        return _to_result(await answer)

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch = [(sample, answer) for sample, answer in self._waiting if not answer.done()]  # skip cancelled calls
        self._waiting = []
        if batch:
            task = asyncio.get_running_loop().create_task(self._send(batch))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def _send(self, batch: list[tuple[dict[str, Any], asyncio.Future[Any]]]) -> None:
        try:
            answer = await self._client.post("", {"samples": [sample for sample, _ in batch]})
            scores = answer.get("scores") if isinstance(answer, Mapping) else None
            if not isinstance(scores, list) or len(scores) != len(batch):
                raise SampleError(f"the server returned {answer!r:.100} instead of scores for {len(batch)} samples")
        except Exception as error:  # raised in the calls that wait for the samples
            for _, waiting in batch:
                if not waiting.done():
                    waiting.set_exception(error)
            return
        for (_, waiting), score in zip(batch, scores, strict=True):
            if not waiting.done():
                waiting.set_result(score)


def _check_json(sample: Mapping[str, Any]) -> None:
    for name, value in sample.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise SampleError(
                f"column {name!r} holds {value!r:.60} ({type(value).__name__}), which JSON cannot represent: {error}\n"
                "Store it as text or numbers in the data, or remove it from `columns`."
            ) from error


def _to_result(score: Any) -> RewardResult:
    """Convert a score, or a score with metrics, to a RewardResult; the runner checks that it is a number."""
    if isinstance(score, Mapping):
        if "score" not in score:
            raise SampleError(f"the server returned {score!r:.100}, which has no score")
        return RewardResult(score["score"], metrics=dict(score.get("metrics") or {}))
    return RewardResult(score)
