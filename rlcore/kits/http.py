"""JSON over HTTP with the standard library, to a running server of an engine or of rewards.

`call` blocks, `acall` is for many concurrent requests; both have a deadline. Proxies are not used. The environments of the
core, vLLM and SGLang have no HTTP client in common, and aiohttp or httpx take 0.2 s to import.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from rlcore.errors import ConfigError, DeadlineExceeded, InfrastructureError


class _Received(io.BytesIO):
    """Received bytes, which http.client reads in place of a socket."""

    def makefile(self, *_: object) -> _Received:
        return self


class BadAnswer(InfrastructureError):
    """The server responded with an error; `status` is the HTTP status."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class JsonClient:
    """Client of one server. Example: JsonClient("http://localhost:30000", "SGLang", timeout_s=600)"""

    url: str
    name: str
    """Name of the server software, for errors: "SGLang"."""
    timeout_s: float
    """Time limit of each answer, in seconds."""
    start: str = ""
    """Command that starts the server, for errors."""
    setting: str = "timeout_s"
    """Name of the setting with the time limit, for errors."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers of every request, such as {"Authorization": "Bearer …"}."""

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request and return the decoded answer.

        Raises:
            InfrastructureError: no server answers.
            BadAnswer: the answer is an error.
            DeadlineExceeded: no answer in time.
        """
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=self.timeout_s)
        with self._explained(path), contextlib.closing(connection):
            content = None if body is None else json.dumps(body)
            connection.request(method, parts.path + path, content, {"Content-Type": "application/json", **self.headers})
            return self._decoded(path, connection.getresponse())

    async def acall(self, path: str, body: Any) -> Any:
        """Send a POST request asynchronously, like `call`."""
        with self._explained(path):
            async with asyncio.timeout(self.timeout_s):
                return self._decoded(path, await self._post(path, json.dumps(body).encode()))

    async def _post(self, path: str, body: bytes) -> http.client.HTTPResponse:
        """Return the response; HTTP/1.0 ends it by closing the connection."""
        parts = urlsplit(self.url)
        secure = parts.scheme == "https"
        port = parts.port or (443 if secure else 80)
        reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=secure)
        try:
            own = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
            head = (
                f"POST {parts.path}{path} HTTP/1.0\r\nHost: {parts.netloc}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n{own}\r\n"
            )
            writer.write(head.encode() + body)
            await writer.drain()
            received: Any = _Received(await reader.read(-1))
        finally:
            writer.close()
        response = http.client.HTTPResponse(received)
        response.begin()
        return response

    def _decoded(self, path: str, response: http.client.HTTPResponse) -> Any:
        """Return the decoded content; a truncated answer raises an error of http.client or ValueError."""
        status, content = response.status, response.read()
        if status != 200:
            text = content.decode(errors="replace").strip()[:500]
            advice = "Name the variable with its key:  api_key_variable=NAME" if status == 401 else "See its log."
            raise BadAnswer(
                f"the {self.name} server at {self.url} answered {path} with {status}: {text}\n{advice}", status
            )
        try:
            return json.loads(content) if content else None
        except ValueError:
            if response.headers.get_content_subtype() == "json":
                raise
            return content.decode(errors="replace")  # some servers confirm in plain text

    @contextlib.contextmanager
    def _explained(self, path: str) -> Iterator[None]:
        """Convert errors of the connection to errors that state what to do."""
        try:
            yield
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the {self.name} server at {self.url} did not answer {path} within {self.timeout_s:g} s\n"
                f"Wait longer:  {self.setting}={2 * self.timeout_s:g}   or see the server's log"
            ) from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise InfrastructureError(
                f"incomplete response from the {self.name} server at {self.url} to {path}: {str(error) or type(error).__name__}\n"
                f"Start or restart it:  {self.start or 'see the README of the plugin'}"
            ) from error


def bearer(variable: str) -> dict[str, str]:
    """Return the header with the key in this environment variable; empty without a variable."""
    if variable and not os.environ.get(variable):
        raise ConfigError(f"api_key_variable={variable}: this variable is not set\nType  export {variable}=KEY")
    return {"Authorization": f"Bearer {os.environ[variable]}"} if variable else {}
