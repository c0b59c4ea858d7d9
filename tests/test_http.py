"""Responses of a server: complete ones are decoded, and incomplete ones are errors."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

import pytest

from rlcore.errors import ConfigError, DeadlineExceeded, InfrastructureError
from rlcore.kits.http import BadAnswer, JsonClient, bearer
from rlcore.testing.waiting import HANG_S

JSON, TEXT = "application/json", "text/plain"


@contextlib.contextmanager
def answering(content, *, kind=JSON, length=None, status="200 OK"):
    """Start a server that answers one request, with this Content-Length, and closes the connection."""
    length = len(content) if length is None else length
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(HANG_S)

        def serve():
            connection, _ = listening.accept()
            connection.recv(65536)
            head = f"HTTP/1.1 {status}\r\nContent-Length: {length}\r\nContent-Type: {kind}\r\n\r\n"
            connection.sendall(head.encode() + content)
            connection.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield JsonClient(f"http://127.0.0.1:{listening.getsockname()[1]}", "test", 5.0)
        thread.join(HANG_S)


def call(server):
    return server.call("POST", "/path", {})


def acall(server):
    return asyncio.run(server.acall("/path", {}))


@pytest.fixture(params=[call, acall])
def ask(request):
    return request.param


@pytest.mark.parametrize(
    ("content", "kind", "decoded"),
    [(b'{"a": [1]}', JSON, {"a": [1]}), (b"", JSON, None), (b"Cache flushed.", TEXT, "Cache flushed.")],
)
def test_a_complete_answer_is_decoded(ask, content, kind, decoded):
    with answering(content, kind=kind) as server:
        assert ask(server) == decoded


@pytest.mark.parametrize(
    ("content", "length"),
    [(b'{"choices": [{"tok', 1000), (b'{"choices": [{"tok', 18), (b"", 10)],
    ids=["shorter than it says", "no JSON", "nothing"],
)
def test_a_truncated_answer_is_an_error(ask, content, length):
    with (
        answering(content, length=length) as server,
        pytest.raises(InfrastructureError, match="incomplete response from the test server"),
    ):
        ask(server)


def test_a_server_that_does_not_answer_in_time_is_an_error_with_the_setting(ask):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(DeadlineExceeded, match=r"within 0.1 s\nWait longer:  rollout.timeout_s=0.2 "):
            ask(JsonClient(address, "test", 0.1, setting="rollout.timeout_s"))


def test_an_error_response_is_raised_with_its_status(ask):
    with answering(b"no such path", kind=TEXT, status="404 Not Found") as server, pytest.raises(BadAnswer) as caught:
        ask(server)
    assert caught.value.status == 404 and "no such path" in str(caught.value)


def test_an_api_key_is_sent_and_a_missing_one_is_named(ask, monkeypatch):
    with (
        answering(b"{}", status="401 Unauthorized") as server,
        pytest.raises(BadAnswer, match="api_key_variable=NAME"),
    ):
        ask(server)
    monkeypatch.setenv("SOME_KEY", "abc")
    assert bearer("SOME_KEY") == {"Authorization": "Bearer abc"} and bearer("") == {}
    monkeypatch.delenv("SOME_KEY")
    with pytest.raises(
        ConfigError, match=r"api_key_variable=SOME_KEY: this variable is not set\nType  export SOME_KEY"
    ):
        bearer("SOME_KEY")


def test_an_answer_that_is_not_http_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            connection, _ = listening.accept()
            connection.recv(65536)
            connection.sendall(b"hello\r\n\r\n")
            connection.close()

        threading.Thread(target=serve, daemon=True).start()
        server = JsonClient(f"http://127.0.0.1:{listening.getsockname()[1]}", "test", 5.0)
        with pytest.raises(InfrastructureError, match="incomplete response"):
            acall(server)
