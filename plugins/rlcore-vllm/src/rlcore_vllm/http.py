"""JSON over HTTP with the standard library: `call` blocks, `acall` can be cancelled, and both end at a deadline.

No proxies: an engine is a neighbour. A cancelled `acall` closes its connection, by which vLLM aborts the request.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import ssl
from typing import Any
from urllib.parse import urlsplit

from rlcore.errors import DeadlineExceeded, InfrastructureError


def call(url: str, method: str, path: str, body: Any = None, *, timeout_s: float) -> Any:
    """The decoded answer.

    Raises:
        InfrastructureError: nobody answers, or the answer is an error.
        DeadlineExceeded: no answer in time.
    """
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        content = None if body is None else json.dumps(body)
        connection.request(method, parts.path + path, content, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return _decoded(url, path, response.status, response.read())
    except TimeoutError as error:
        raise _late(url, path, timeout_s) from error
    except (OSError, http.client.HTTPException) as error:
        raise _unreachable(url, path, error) from error
    finally:
        connection.close()


async def acall(url: str, path: str, body: Any, *, timeout_s: float) -> Any:
    """`call` with POST, for many requests at once."""
    try:
        async with asyncio.timeout(timeout_s):
            status, content = await _post(url, path, json.dumps(body).encode())
    except TimeoutError as error:
        raise _late(url, path, timeout_s) from error
    except (OSError, ValueError, IndexError) as error:
        raise _unreachable(url, path, error) from error
    return _decoded(url, path, status, content)


async def _post(url: str, path: str, body: bytes) -> tuple[int, bytes]:
    """Status and content. In HTTP/1.0 the server's closing of the connection ends the answer."""
    parts = urlsplit(url)
    secure = ssl.create_default_context() if parts.scheme == "https" else None
    reader, writer = await asyncio.open_connection(
        parts.hostname, parts.port or (443 if secure else 80), ssl=secure, limit=2**20
    )
    try:
        head = (
            f"POST {parts.path}{path} HTTP/1.0\r\nHost: {parts.netloc}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await writer.drain()
        answer = await reader.read(-1)
    finally:
        writer.close()
    headers, _, content = answer.partition(b"\r\n\r\n")
    return int(headers.split(maxsplit=2)[1]), content


def _decoded(url: str, path: str, status: int, content: bytes) -> Any:
    if status != 200:
        text = content.decode(errors="replace").strip()[:500]
        raise InfrastructureError(f"the vLLM server at {url} answered {path} with {status}: {text}\nSee its log.")
    try:
        return json.loads(content) if content else None
    except ValueError as error:
        raise _unreachable(url, path, error) from error


def _late(url: str, path: str, timeout_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"the vLLM server at {url} did not answer {path} within {timeout_s:g} s\n"
        "Wait longer:  rollout.timeout_s=3600   or see the server's log"
    )


def _unreachable(url: str, path: str, error: Exception) -> InfrastructureError:
    return InfrastructureError(
        f"no whole answer from a vLLM server at {url} to {path}: {str(error) or type(error).__name__}\n"
        "Start it, or start it again:  python -m rlcore_vllm.serve MODEL --port PORT"
    )
