"""`rollout.url`: the contract on a real SGLang server, and what is said of servers that will not do."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from rlcore_sglang import SGLangConfig, SGLangRollout
from rlcore_sglang.server import _wrong_server
from rlcore_sglang.weights import LOADER

from rlcore.errors import ConfigError, InfrastructureError
from rlcore.protocols.backend import ModelConfig
from rlcore.protocols.rollout import RolloutContext
from rlcore.rollouts.checks import read_limits
from rlcore.testing import ModelRolloutContract
from rlcore.testing.rollout import request, run, tokens, weights

_START_S = 110.0


@pytest.fixture(scope="module")
def url(small_model, tmp_path_factory):
    """A server made by the line in the README."""
    log = tmp_path_factory.mktemp("server") / "log"
    port = _free_port()
    command = [sys.executable, "-m", "rlcore_sglang.serve", small_model, "--port", str(port), "--max-batch-size", "16"]
    with log.open("wb") as file:
        server = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
    try:
        _wait(f"http://127.0.0.1:{port}", server, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait(10)


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait(url, server, log):
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(f"{url}/model_info", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"no server after {_START_S:g} s:\n{log.read_text()[-3000:]}")


def _client(url, model, **options):
    return SGLangRollout(SGLangConfig(url=url, **options), model=ModelConfig(path=model), context=RolloutContext())


class TestServer(ModelRolloutContract):
    tolerance = 5e-3  # as in test_contract.py

    def make(self, model, context):
        return SGLangRollout(SGLangConfig(url=self.url), model=model, context=context)

    @pytest.fixture(autouse=True)
    def _address(self, url):
        type(self).url = url

    @pytest.fixture
    def model_path(self, small_model):
        return small_model


def test_a_second_run_does_not_inherit_the_weights_of_the_first(url, small_model):
    first = _client(url, small_model)
    before = tokens(run(first, [request(0), request(1)]))
    first.load_weights(iter([(name, tensor * 3) for name, tensor in weights(small_model)]), 9)
    assert tokens(run(first, [request(0), request(1)])) != before

    second = _client(url, small_model)
    samples = run(second, [request(0), request(1)])

    assert tokens(samples) == before
    assert {sample.policy_version for sample in samples} == {0}


def test_a_server_with_another_model_is_refused(url, tiny_llama):
    with pytest.raises(ConfigError, match=r"it serves another model than model.path") as caught:
        _client(url, tiny_llama)
    assert "python -m rlcore_sglang.serve" in str(caught.value)


def test_a_server_that_does_not_answer_is_named(small_model):
    with pytest.raises(InfrastructureError, match=r"no whole answer from a SGLang server at http://127.0.0.1:9"):
        _client("http://127.0.0.1:9", small_model)


@pytest.mark.parametrize(
    ("known", "status", "said"),
    [
        ((), 404, "is no SGLang server"),
        (("/model_info", "/server_info"), 404, "does not know pause_generation"),
        (("/model_info", "/server_info"), 400, "answered /pause_generation with 400"),
    ],
    ids=["no SGLang", "a router", "a server that refuses"],
)
def test_calls_that_a_server_does_not_take_are_named(small_model, known, status, said):
    with _stub(small_model, known, status) as address, pytest.raises((ConfigError, InfrastructureError), match=said):
        _client(address, small_model).load_weights(iter(weights(small_model)), 1)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"version": "0.5.9"}, "it is SGLang 0.5.9"),
        ({"dp_size": 2}, "SGLang refuses new weights for replicas"),
        ({"custom_weight_loader": []}, "rollout.weights=disk"),
        ({"enable_deterministic_inference": False}, "rollout.deterministic=false"),
        ({"context_length": 3}, "rollout.max_model_len=3"),
    ],
)
def test_servers_that_cannot_be_trained_with_are_told_apart(small_model, facts, said):
    reasons = _wrong_server(_INFO | facts, SGLangConfig(), read_limits(small_model))
    assert len(reasons) == 1 and said in reasons[0]


def test_the_server_of_the_readme_is_fit(small_model):
    assert _wrong_server(_INFO, SGLangConfig(), read_limits(small_model)) == []


_INFO = {
    "version": "0.5.21",
    "dp_size": 1,
    "tp_size": 1,
    "custom_weight_loader": [LOADER],
    "enable_deterministic_inference": True,
    "context_length": None,
}


class _stub:
    """An HTTP server that knows some paths and answers others with a status."""

    def __init__(self, model, known, status):
        config = json.loads((Path(model) / "config.json").read_text())
        about = {"model_path": model, "architectures": config["architectures"], "weight_version": "0"}

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self.send_response(200 if self.path in known else status)
                self.end_headers()
                self.wfile.write(json.dumps(about | _INFO).encode())

            do_POST = do_GET

            def log_message(self, *_):
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, args=[0.05], daemon=True).start()
        return f"http://127.0.0.1:{self.server.server_port}"

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()
