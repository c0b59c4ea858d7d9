"""HTTP client of rewards that use a server, with a concurrency limit and retries."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from rlcore.errors import InfrastructureError, require, require_at_least
from rlcore.kits.http import BadAnswer, JsonClient, bearer

_RETRYABLE = (408, 425, 429, 500, 502, 503, 504)
"""Status codes of temporary failures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Options of rewards that use a server."""

    url: str
    """Address of the server, such as http://localhost:8000/score"""
    timeout_s: float = 30.0
    """Timeout of one attempt; reward.timeout_s limits all attempts for a sample together."""
    retries: int = 3
    """Number of further attempts after a temporary failure."""
    backoff_s: float = 0.5
    """Wait before the second attempt, doubled before each further one; up to half of it is random."""
    max_concurrency: int = 16
    """Maximum number of concurrent requests of each reward process (reward.num_processes)."""
    api_key_variable: str = ""
    """Name of an environment variable with the API key, which is sent as bearer token."""

    def __post_init__(self) -> None:
        require(urlsplit(self.url).scheme in ("http", "https"), "url", "http://… or https://…", self.url, "http://HOST")
        require(self.timeout_s > 0, "timeout_s", "more than 0", self.timeout_s, 30.0)
        require_at_least(self, retries=0, backoff_s=0, max_concurrency=1)


class Client:
    """Client of one server, for a single event loop."""

    def __init__(self, config: ServerConfig, what: str) -> None:
        """Set up the connection; `what` names the server in errors."""
        headers = bearer(config.api_key_variable)
        self._config = config
        self._server = JsonClient(config.url.rstrip("/"), name=what, timeout_s=config.timeout_s, headers=headers)
        self._slots = asyncio.Semaphore(config.max_concurrency)

    async def post(self, path: str, body: Any) -> Any:
        """Send a request, with retries, and return the decoded response.

        Raises:
            InfrastructureError: the last attempt failed or was refused.
        """
        for attempt in range(self._config.retries + 1):
            try:
                async with self._slots:
                    return await self._server.acall(path, body)
            except InfrastructureError as error:
                permanent = isinstance(error, BadAnswer) and error.status not in _RETRYABLE
                if permanent or attempt == self._config.retries:
                    error.add_note(f"after {attempt + 1} attempts")
                    raise
            await asyncio.sleep(self._config.backoff_s * 2**attempt * random.uniform(0.5, 1.0))
        raise AssertionError("unreachable")
