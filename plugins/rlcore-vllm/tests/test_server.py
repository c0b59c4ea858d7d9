"""A server that runs already: the contract over HTTP, its death in each phase, and servers that are not the right one."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from conftest import requests_of, run, tokens
from rlcore_vllm import VLLMConfig, VLLMRollout

from rlcore.errors import ConfigError, DeadlineExceeded, InfrastructureError, ModelError
from rlcore.protocols.backend import ModelConfig
from rlcore.protocols.rollout import RolloutContext
from rlcore.rollouts.http import Server
from rlcore.testing import ModelRolloutContract
from rlcore.testing.rollout import weights

pytestmark = pytest.mark.slow
_START_S = 180


def start(model, log):
    """(process, url) of a server that answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "rlcore_vllm.serve", model, "--port", str(port), "--max-batch-size", "32"]
    with open(log, "w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + _START_S
    while True:
        try:
            Server(url, "vLLM", 2.0).call("GET", "/v1/models")
            return process, url
        except InfrastructureError:
            if process.poll() is not None or time.monotonic() > deadline:
                end(process)
                pytest.fail(f"the server did not start:\n{log.read_text()[-3000:]}")
            time.sleep(0.3)


def end(process):
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)  # its engine is a child in the same session
    process.wait(timeout=10)


@pytest.fixture(scope="module")
def server(small_model, tmp_path_factory):
    process, url = start(small_model, tmp_path_factory.mktemp("server") / "log")
    yield url
    end(process)


@pytest.fixture
def mortal(small_model, tmp_path):
    process, url = start(small_model, tmp_path / "log")
    yield process, url
    end(process)


def connect(model, url, **config):
    config = VLLMConfig(**({"url": url, "timeout_s": 20.0, "max_batch_size": 16} | config))
    return VLLMRollout(config, model=ModelConfig(path=model), context=RolloutContext())


class TestServer(ModelRolloutContract):
    def make(self, model, context):
        return connect(model.path, self.url, bucket_mb=1)

    @pytest.fixture(autouse=True)
    def _own(self, server, small_model):
        type(self).url = server

    @pytest.fixture
    def model_path(self, small_model):
        return small_model


def test_a_new_run_starts_from_its_own_model_and_not_from_what_an_earlier_one_left(server, small_model):
    asked = requests_of([[3, 4, 5], [6, 7]])
    before = connect(small_model, server)
    before.load_weights(iter(weights(small_model)), 0)
    wanted = run(before, asked)
    before.load_weights(iter([(name, tensor * 1.5) for name, tensor in weights(small_model)]), 9)
    assert list(run(before, asked)[0].log_probs) != pytest.approx(list(wanted[0].log_probs), abs=1e-2)

    found = run(connect(small_model, server), asked)
    assert tokens(found) == tokens(wanted)
    assert list(found[0].log_probs) == pytest.approx(list(wanted[0].log_probs), abs=1e-5)
    assert found[0].policy_version == 0


def test_after_half_an_update_the_server_serves_nobody(server, small_model):
    engine = connect(small_model, server)
    with pytest.raises(ModelError, match="did not come"):
        engine.load_weights(iter(weights(small_model)[:-1]), 5)

    body = {"token_ids": [3, 4], "sampling_params": {"max_tokens": 2}}
    with pytest.raises(DeadlineExceeded):
        Server(server, "vLLM", 1.5).call("POST", "/inference/v1/generate", body)

    engine.load_weights(iter(weights(small_model)), 6)
    assert run(engine, requests_of([[3, 4, 5]]))[0].policy_version == 6


def test_a_server_that_was_paused_stays_so_over_an_update(server, small_model):
    engine = connect(small_model, server)
    engine.pause()
    engine.load_weights(iter(weights(small_model)), 8)

    async def asked():
        return [sample async for sample in engine.generate(requests_of([[3, 4, 5]]))]

    async def paused():
        task = asyncio.create_task(asked())
        await asyncio.sleep(1.0)
        assert not task.done()
        engine.resume()
        return await asyncio.wait_for(task, 10)

    assert asyncio.run(paused())[0].policy_version == 8


def test_a_server_with_another_model_is_refused(server, story_model):
    with pytest.raises(ConfigError, match=r"another model.*architecture Qwen2ForCausalLM instead of LlamaForCausalLM"):
        connect(story_model, server)


def test_the_number_of_servers_must_be_that_of_the_ranks(small_model):
    with pytest.raises(ConfigError, match="names 2 servers, and the rollout's pool has 1 ranks"):
        connect(small_model, "http://a:1, http://b:2")


def test_a_server_that_is_not_there_is_named_with_the_line_that_starts_it(small_model):
    with pytest.raises(InfrastructureError, match=r"127.0.0.1:9 to /v1/models: .*refused\n.*rlcore_vllm.serve"):
        connect(small_model, "http://127.0.0.1:9")


def test_a_server_killed_while_generating_ends_the_call_at_once(mortal, small_model):
    process, url = mortal
    engine = connect(small_model, url)

    async def generate_and_kill():
        asked = requests_of([[3 + i] for i in range(16)], temperature=1.0, max_response_tokens=100)
        stream = engine.generate(asked)
        await anext(stream)
        os.killpg(process.pid, signal.SIGKILL)
        async for _ in stream:
            pass

    with pytest.raises(InfrastructureError, match="no whole answer from a vLLM server"):
        asyncio.run(asyncio.wait_for(generate_and_kill(), 30))


def test_a_server_killed_while_weights_arrive_is_an_error_and_serves_nothing(mortal, small_model):
    process, url = mortal
    engine = connect(small_model, url, bucket_mb=1)

    def dying():
        pairs = weights(small_model)
        yield from pairs[:3]
        os.killpg(process.pid, signal.SIGKILL)
        yield from pairs[3:]

    with pytest.raises(InfrastructureError, match="no whole answer from a vLLM server"):
        engine.load_weights(dying(), 1)
    with pytest.raises(InfrastructureError, match="no whole set of weights"):
        run(engine, requests_of([[3, 4]]))
