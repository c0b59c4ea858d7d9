"""`rollout.url`: the contract on a real SGLang server, and errors for unsuitable servers."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch
from rlcore_sglang import SGLangConfig, SGLangRollout
from rlcore_sglang.server import _wrong_server
from rlcore_sglang.weights import LOADER, NO_VERSION
from rlcore_tests.counts import counted_tokens
from test_runs import check_async

from rlcore.errors import ConfigError, DeadlineExceeded, InfrastructureError, ModelError
from rlcore.kits import http
from rlcore.kits.engine.checks import end_ids, read_limits
from rlcore.protocols.backend import ModelConfig
from rlcore.protocols.rollout import RolloutContext
from rlcore.quickstart import locate
from rlcore.testing import ModelRolloutContract
from rlcore.testing.rollout import request, run, tokens, weights
from rlcore.testing.waiting import HANG_S

_GRACE_S = 20.0
"""Seconds that a server has to stop before it is killed."""


@pytest.fixture(scope="module")
def url(small_model, tmp_path_factory):
    """A server started by the command in the README."""
    with serving(
        ["rlcore_sglang.serve", small_model, "--max-batch-size", "16"], tmp_path_factory.mktemp("server")
    ) as at:
        yield at


@pytest.fixture(scope="module")
def second_url(small_model, tmp_path_factory):
    """A second server."""
    with serving(
        ["rlcore_sglang.serve", small_model, "--max-batch-size", "16"], tmp_path_factory.mktemp("second")
    ) as at:
        yield at


@pytest.fixture(scope="module")
def router(url, second_url, tmp_path_factory):
    """SGLang's router in front of both servers, in round-robin order."""
    pytest.importorskip("sglang_router", reason="pip install sglang-router")
    command = ["sglang_router.launch_router", "--worker-urls", url, second_url, "--policy", "round_robin"]
    with serving(
        [*command, "--prometheus-port", str(_free_port())], tmp_path_factory.mktemp("router"), "/readiness"
    ) as at:
        yield at


@contextlib.contextmanager
def serving(module, directory, ready="/model_info"):
    """Run `python -m MODULE …` on a free port and yield its address."""
    port, log = _free_port(), directory / "log"
    command = [sys.executable, "-m", *module, "--port", str(port)]
    with log.open("wb") as file:
        server = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
    try:
        _wait(f"http://127.0.0.1:{port}{ready}", server, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait(HANG_S)


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait(address, server, log):
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(address, timeout=HANG_S):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"no server after {HANG_S:g} s:\n{log.read_text()[-3000:]}")


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


def scaled(model, factor):
    return [(name, tensor * factor) for name, tensor in weights(model)]


def endless(model):
    """Weights under which all tokens but the end are equally likely, so that every response has its maximum length."""
    found = []
    for name, tensor in weights(model):
        new = torch.full_like(tensor, 1.0 if "norm" in name or "embed" in name else 0.0)
        if "embed" in name:  # tied to the output
            new[list(end_ids(model))] = -1.0
        found.append((name, new))
    return found


def test_tokens_of_unfinished_responses_are_counted(url, small_model):
    client = _client(url, small_model)
    client.load_weights(iter(endless(small_model)), 5)
    found = asyncio.run(asyncio.wait_for(counted_tokens(client, [request(0, max_response_tokens=100)]), HANG_S))

    assert found[0] < found[-2]


def test_a_server_serves_nothing_between_an_incomplete_and_a_complete_update(url, small_model):
    first = _client(url, small_model)
    before = tokens(run(first, [request(0), request(1)]))
    with pytest.raises(ModelError, match="weights are missing"):
        first.load_weights(iter(scaled(small_model, 3)[:-1]), 1)
    stranger = http.JsonClient(url, "SGLang", timeout_s=2.0)  # another client, such as a router
    with pytest.raises(DeadlineExceeded):
        stranger.call("POST", "/generate", {"input_ids": [3, 4], "sampling_params": {"max_new_tokens": 1}})

    assert tokens(run(_client(url, small_model), [request(0), request(1)])) == before


def test_an_update_left_open_by_a_killed_run_is_closed(url, small_model):
    first = _client(url, small_model)
    before = tokens(run(first, [request(0), request(1)]))
    first._engine.control("pause_generation", mode="retract")
    first._engine.control("update_weight_version", new_version=NO_VERSION, abort_all_requests=False)
    first._engine.control("begin_weight_update", selector="all")

    assert tokens(run(_client(url, small_model), [request(0), request(1)])) == before


def test_a_server_gets_at_most_max_batch_size_requests_at_once(url, small_model):
    client = _client(url, small_model, max_batch_size=3)
    num_waiting, most, answer = 0, 0, client._engine.answer

    async def counting(*arguments):
        nonlocal num_waiting, most
        num_waiting += 1
        most = max(most, num_waiting)
        try:
            return await answer(*arguments)
        finally:
            num_waiting -= 1

    client._engine.answer = counting
    assert len(run(client, [request(i) for i in range(12)])) == 12
    assert most == 3


class TestRouter:
    """Two ranks, each with its own server, and a router that sends requests to either."""

    @pytest.fixture
    def ranks(self, url, second_url, router, small_model):
        def client(rank, **options):
            config = SGLangConfig(url=f"{url},{second_url}", router=router, **options)
            return SGLangRollout(
                config, model=ModelConfig(path=small_model), context=RolloutContext(rank=rank, world_size=2)
            )

        return [client(0), client(1)]

    def test_weights_go_to_the_own_server_and_requests_to_both(self, ranks, small_model):
        asked = [request(i) for i in range(6)]
        new = scaled(small_model, 1.5)
        ranks[0].load_weights(iter(new), 5)
        assert {sample.policy_version for sample in run(ranks[1], asked)} == {0, 5}

        ranks[1].load_weights(iter(new), 5)
        found = [run(rank, asked) for rank in ranks]

        assert {sample.policy_version for samples in found for sample in samples} == {5}
        assert tokens(found[0]) == tokens(found[1]), "a seed must fix a response, whichever server samples it"

    @pytest.mark.parametrize("pause", ["retract", "abort"])
    def test_new_weights_come_while_others_wait_for_the_router(self, ranks, small_model, pause):
        for rank in ranks:
            rank._config = replace(rank._config, pause=pause)
            rank.load_weights(iter(endless(small_model)), 5)
        asked = [request(i, max_response_tokens=1 if i == 0 else 60) for i in range(64)]  # a server runs 16 at a time

        async def go():
            stream = ranks[0].generate(asked)
            samples = [await anext(stream)]
            for rank in ranks[::-1]:
                rank.load_weights(iter(scaled(small_model, 1.2)), 6)
            return samples + [sample async for sample in stream]

        samples = asyncio.run(asyncio.wait_for(go(), HANG_S))

        assert sorted(sample.request_id for sample in samples) == list(range(64))
        for sample in samples:
            assert len(sample.token_ids) == len(sample.log_probs) > 0
            assert sample.finish_reason in ("stop", "length"), "aborted responses must have continued"
        assert {5, 6} in [set(sample.token_versions) for sample in samples], "none was in flight during the update"

    def test_a_router_instead_of_a_server_is_named(self, router, small_model):
        with pytest.raises(ConfigError, match=f"rollout.url={router}") as caught:
            _client(router, small_model)
        assert f"rollout.router={router}" in str(caught.value)


def test_a_server_with_another_model_is_refused(url, tiny_llama):
    with pytest.raises(ConfigError, match=r"it serves a different model than model.path") as caught:
        _client(url, tiny_llama)
    assert "python -m rlcore_sglang.serve" in str(caught.value)


def test_an_unreachable_server_is_reported(small_model):
    with pytest.raises(InfrastructureError, match=r"incomplete response from the SGLang server at http://127.0.0.1:9"):
        _client("http://127.0.0.1:9", small_model)


@pytest.mark.parametrize(
    ("known", "status", "message"),
    [
        ((), 404, "is not an SGLang server"),
        (("/model_info", "/server_info"), 404, "does not support pause_generation"),
        (("/model_info", "/server_info"), 400, "answered /pause_generation with 400"),
    ],
    ids=["no SGLang", "a router", "a server that refuses"],
)
def test_calls_that_a_server_refuses_are_reported(small_model, known, status, message):
    with _stub(small_model, known, status) as address, pytest.raises((ConfigError, InfrastructureError), match=message):
        _client(address, small_model).load_weights(iter(weights(small_model)), 1)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"version": "0.5.9"}, "it is SGLang 0.5.9"),
        ({"dp_size": 2}, "SGLang cannot update the weights of replicas"),
        ({"custom_weight_loader": []}, "rollout.weights=disk"),
        ({"enable_deterministic_inference": False}, "rollout.deterministic=false"),
        ({"context_length": 3}, "rollout.max_model_len=3"),
        ({"dtype": "bfloat16"}, "--precision float32"),
    ],
)
def test_an_unsuitable_server_is_refused_with_the_reason(small_model, facts, message):
    reasons = _wrong_server(_INFO | facts, SGLangConfig(), read_limits(small_model), "float32")
    assert len(reasons) == 1 and message in reasons[0]


def test_a_server_started_as_in_the_readme_is_accepted(small_model):
    assert _wrong_server(_INFO, SGLangConfig(), read_limits(small_model), "float32") == []


def test_a_key_is_sent_with_every_call(small_model, monkeypatch):
    monkeypatch.setenv("SERVERS_KEY", "abc")
    stub = _stub(small_model, ("/model_info", "/server_info"), 400)
    with stub as address:
        _client(address, small_model, api_key_variable="SERVERS_KEY")
    assert stub.keys == ["Bearer abc", "Bearer abc"]


_INFO = {
    "version": "0.5.21",
    "dp_size": 1,
    "tp_size": 1,
    "custom_weight_loader": [LOADER],
    "enable_deterministic_inference": True,
    "context_length": None,
    "dtype": "float32",
}


class _stub:
    """An HTTP server that knows some paths and answers all others with a status."""

    def __init__(self, model, known, status):
        config = json.loads((Path(model) / "config.json").read_text())
        about = {"model_path": model, "architectures": config["architectures"], "weight_version": "0"}

        self.keys = keys = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                keys.append(self.headers.get("Authorization"))
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


def test_a_run_sends_weights_to_a_server_while_it_generates(tmp_path):
    command = ["rlcore_sglang.serve", locate("quickstart:model"), "--max-batch-size", "16"]
    with serving(command, tmp_path) as at:
        check_async(tmp_path, sys.executable, f"rollout.url={at}", "pools.rollout.device=cpu", "runtime=ray")
