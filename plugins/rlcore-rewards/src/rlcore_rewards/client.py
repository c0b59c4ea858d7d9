"""Requests to a server of rewards: at most so many at once, tried again after a while where that may help."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from rlcore.errors import InfrastructureError, require
from rlcore.rollouts.http import BadAnswer, Server, bearer

_PASSING = (408, 425, 429, 500, 502, 503, 504)
"""Answers that may be another one later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Options of rewards that ask a server."""

    url: str
    """Such as http://localhost:8000/score"""
    timeout_s: float = 30.0
    """For one attempt. reward.timeout_s bounds all attempts for a sample together."""
    retries: int = 3
    """Further attempts after one that failed or was refused for the time being."""
    backoff_s: float = 0.5
    """Wait before the second attempt; twice as long before each further one, half of it at random."""
    max_concurrency: int = 16
    """Requests at once, of each reward process (reward.num_processes)."""
    api_key_variable: str = ""
    """Name of an environment variable whose value is sent as bearer token."""

    def __post_init__(self) -> None:
        require(urlsplit(self.url).scheme in ("http", "https"), "url", "http://… or https://…", self.url, "http://HOST")
        require(self.timeout_s > 0, "timeout_s", "more than 0", self.timeout_s, 30.0)
        require(self.retries >= 0, "retries", "0 or more", self.retries, 3)
        require(self.backoff_s >= 0, "backoff_s", "0 or more", self.backoff_s, 0.5)
        require(self.max_concurrency >= 1, "max_concurrency", "1 or more", self.max_concurrency, 16)


class Client:
    """One server. Lives in one event loop, as an asynchronous reward does."""

    def __init__(self, config: ServerConfig, what: str) -> None:
        """`what` names the server in errors."""
        headers = bearer(config.api_key_variable)
        self._config = config
        self._server = Server(config.url.rstrip("/"), engine=what, timeout_s=config.timeout_s, headers=headers)
        self._room = asyncio.Semaphore(config.max_concurrency)

    async def post(self, path: str, body: Any) -> Any:
        """The decoded answer.

        Raises:
            InfrastructureError: no answer, or a refusal, after all attempts.
        """
        for attempt in range(self._config.retries + 1):
            try:
                async with self._room:
                    return await self._server.acall(path, body)
            except InfrastructureError as error:
                lasting = isinstance(error, BadAnswer) and error.status not in _PASSING
                if lasting or attempt == self._config.retries:
                    error.add_note(f"after {attempt + 1} attempts")
                    raise
            await asyncio.sleep(self._config.backoff_s * 2**attempt * random.uniform(0.5, 1.0))
        raise AssertionError("unreachable")
