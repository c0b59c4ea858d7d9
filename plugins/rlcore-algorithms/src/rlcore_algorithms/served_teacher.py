"""A teacher behind a server of vLLM, which returns the log-prob of every token of a prompt (`prompt_logprobs`).

POST url/completions   {"model": "…", "prompt": [5, 9, 7], "max_tokens": 1, "prompt_logprobs": 0, "temperature": 0}
response   {"choices": [{"prompt_logprobs": [null, {"9": {"logprob": -0.5, …}}, {"7": {"logprob": -1.5, …}}], …}], …}

The log-probs are those at temperature 1.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any
from urllib.parse import urlsplit

import torch

from rlcore import Batch, Worker, dispatch
from rlcore.errors import ConfigError, InfrastructureError, RunError, require, require_at_least
from rlcore.kits.http import BadAnswer, JsonClient, bearer
from rlcore.protocols.worker import WorkerContext
from rlcore.workers.plan import RunPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherServerConfig:
    """Server of a teacher with the student's tokenizer, which is not checked: `vllm serve MODEL`."""

    url: str = ""
    """Base address, such as http://localhost:8000/v1; empty: the teacher is a role of the run."""
    model: str = ""
    """Name of the model on the server."""
    timeout_s: float = 120.0
    """Timeout of one attempt."""
    retries: int = 3
    """Number of further attempts after a temporary failure; after the last one, the run ends."""
    max_concurrency: int = 16
    """Maximum number of concurrent requests of each worker."""
    api_key_variable: str = ""
    """Name of an environment variable with the API key, which is sent as bearer token."""

    def __post_init__(self) -> None:
        known = not self.url or urlsplit(self.url).scheme in ("http", "https")
        require(known, "url", "http://… or https://…", self.url, "http://HOST/v1")
        require(bool(self.model) or not self.url, "model", "the name of the model on the server", "nothing", "NAME")
        require(self.timeout_s > 0, "timeout_s", "more than 0", self.timeout_s, 120.0)
        require_at_least(self, retries=0, max_concurrency=1)


class ServedTeacherWorker(Worker):
    """Asks the server of `algorithm.server` for log-probs."""

    @classmethod
    def options_of(cls, plan: RunPlan, role: str) -> dict[str, Any]:
        return {"server": plan.algorithm.config.server}

    @classmethod
    def check(cls, plan: RunPlan, role: str) -> None:
        temperature = plan.config.sampling.temperature
        if temperature != 1:
            raise ConfigError(
                f"sampling.temperature={temperature:g}, but a server returns a teacher's log-probs at temperature 1\n"
                "Type  sampling.temperature=1   or give a directory:  algorithm.teacher=DIR"
            )

    def __init__(self, context: WorkerContext, *, server: TeacherServerConfig) -> None:
        super().__init__(context)
        self._server = server
        headers = bearer(server.api_key_variable)
        self._client = JsonClient(server.url.rstrip("/"), "teacher", timeout_s=server.timeout_s, headers=headers)

    @dispatch("dp", reads=("input_ids", "loss_mask"), on_device=False)
    def log_probs(self, batch: Batch) -> Batch:
        """Return the column `ref_log_probs` of the teacher, [T] float32, zero outside `loss_mask`.

        Raises:
            InfrastructureError: the last attempt for a sample failed.
            RunError: the server refused a request, or its answer has no log-probs of the tokens.
        """
        found = asyncio.run(self._ask([ids.tolist() for ids in batch["input_ids"].split(batch.lengths.tolist())]))
        return Batch.of(
            lengths=batch.lengths, tokens={"ref_log_probs": torch.where(batch["loss_mask"], torch.tensor(found), 0.0)}
        )

    async def _ask(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Return the log-probs of the tokens of all rows, concatenated; 0 for the first token of each."""
        slots = asyncio.Semaphore(self._server.max_concurrency)

        async def one(ids: Sequence[int]) -> list[float]:
            async with slots:
                return log_probs_of(await self._post(ids), ids)

        return list(chain.from_iterable(await asyncio.gather(*map(one, rows))))

    async def _post(self, ids: Sequence[int]) -> Any:
        asked = {"prompt": ids, "max_tokens": 1, "prompt_logprobs": 0, "temperature": 0}
        for attempt in range(self._server.retries + 1):
            try:
                return await self._client.acall("/completions", {"model": self._server.model, **asked})
            except InfrastructureError as error:
                if isinstance(error, BadAnswer) and error.status < 500 and error.status not in (408, 425, 429):
                    raise RunError(f"{error}\nCheck algorithm.server.url, .model and .api_key_variable.") from error
                if attempt == self._server.retries:
                    error.add_note(f"after {attempt + 1} attempts")
                    raise
            await asyncio.sleep(0.5 * 2**attempt)
        raise AssertionError("unreachable")


def log_probs_of(answer: Any, ids: Sequence[int]) -> list[float]:
    """Return the log-prob of each token in an answer, 0 for the first one."""
    try:
        entries = answer["choices"][0]["prompt_logprobs"]
        found = [float(entries[place][str(token)]["logprob"]) for place, token in enumerate(ids) if place]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise RunError(
            f"the teacher's server returned {answer!r:.100}, without a log-prob of every token of the prompt\n"
            "It must be a server of vLLM, and its model must have the student's tokenizer."
        ) from error
    if len(entries) != len(ids) or not all(map(math.isfinite, found)):
        raise RunError(
            f"the teacher's server returned {len(entries)} log-probs for {len(ids)} tokens, or some that are not finite"
            "\nCompare the tokenizers of student and teacher, and see the log of the server."
        )
    return [0.0, *found]
