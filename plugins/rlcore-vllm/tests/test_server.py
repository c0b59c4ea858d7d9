"""A running server: the contract over HTTP, its death in each phase, and unsuitable servers."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from conftest import collect, make_hf, requests_of, run, tokens
from models import flattened, save_tiny, teacher_forced
from rlcore_tests.counts import counted_tokens
from rlcore_vllm import VLLMConfig, VLLMRollout
from rlcore_vllm import server as server_module
from test_runs import check_async

from rlcore.errors import ConfigError, DeadlineExceeded, InfrastructureError, ModelError
from rlcore.kits.http import JsonClient
from rlcore.models.load import load_model, load_tokenizer
from rlcore.protocols.backend import ModelConfig
from rlcore.protocols.rollout import RolloutContext
from rlcore.quickstart import locate
from rlcore.testing import ModelRolloutContract
from rlcore.testing.rollout import weights
from rlcore.testing.waiting import HANG_S

pytestmark = pytest.mark.slow


def start(model, log):
    """Start a server and return (process, url) when it responds."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "rlcore_vllm.serve", model, "--port", str(port), "--max-batch-size", "32"]
    with open(log, "w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + HANG_S
    while True:
        try:
            JsonClient(url, "vLLM", 2.0).call("GET", "/v1/models")
            return process, url
        except InfrastructureError:
            if process.poll() is not None or time.monotonic() > deadline:
                end(process)
                pytest.fail(f"the server did not start:\n{log.read_text()[-3000:]}")
            time.sleep(0.3)


def end(process):
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)  # its engine is a child in the same session
    process.wait(timeout=HANG_S)


@pytest.fixture(scope="module")
def server(small_model, tmp_path_factory):
    process, url = start(small_model, tmp_path_factory.mktemp("server") / "log")
    yield url
    end(process)


@pytest.fixture(scope="module")
def llama(small_model, tmp_path_factory):
    """A model that samples long responses."""
    return save_tiny("Llama", tmp_path_factory.mktemp("llama"), small_model)


@pytest.fixture(scope="module")
def server_of_llama(llama, scheduling, tmp_path_factory):
    process, url = start(llama, tmp_path_factory.mktemp("server") / "log")
    config = JsonClient(url, "vLLM", 60.0).call("GET", "/server_info?config_format=json")["vllm_config"]
    assert config["scheduler_config"]["async_scheduling"] == (scheduling == "async")
    yield url
    end(process)


@pytest.fixture
def mortal(small_model, tmp_path):
    process, url = start(small_model, tmp_path / "log")
    yield process, url
    end(process)


def connect(model, url, **config):
    config = VLLMConfig(**({"url": url, "timeout_s": HANG_S, "max_batch_size": 16} | config))
    return VLLMRollout(config, model=ModelConfig(path=model), context=RolloutContext())


class TestServer(ModelRolloutContract):
    def make(self, model, context):
        return connect(model.path, self.url)

    @pytest.fixture(autouse=True)
    def _own(self, server, small_model):
        type(self).url = server

    @pytest.fixture
    def model_path(self, small_model):
        return small_model


class TestServerByBroadcast(TestServer):
    def make(self, model, context):
        return connect(model.path, self.url, weights="broadcast")


def test_a_server_applies_penalties(server, small_model):
    asked = requests_of([list(range(4, 20))], max_response_tokens=20, repetition_penalty=1.5)

    found = run(connect(small_model, server), asked)

    assert tokens(found) == tokens(run(make_hf(small_model), asked))


def test_a_server_applies_patterns(server, small_model):
    tokenizer = load_tokenizer(small_model)
    asked = {"regex": "[0-9]{3}", "stop_token_ids": (tokenizer.eos_token_id,), "max_response_tokens": 20}

    found = run(connect(small_model, server), requests_of([list(range(4, 20))] * 2, temperature=1.0, **asked))

    texts = [tokenizer.decode(sample.token_ids, skip_special_tokens=True).strip() for sample in found.values()]
    assert [text for text in texts if not re.fullmatch("[0-9]{3}", text)] == []


def test_all_updates_use_one_process_group_and_a_failed_one_creates_another(server, small_model, monkeypatch):
    engine, reference, asked = connect(small_model, server, weights="broadcast"), make_hf(small_model), [[3, 4], [5]]
    paths, post = [], engine._engine._post
    monkeypatch.setattr(engine._engine, "_post", lambda path, body=None: (paths.append(path), post(path, body))[1])
    monkeypatch.setattr(server_module, "_MB", 100)
    engine._engine._group = None  # the group of the initial weights, if any

    def update(version, scale):
        new = [(name, tensor.detach() * scale) for name, tensor in weights(small_model)]
        for one in (engine, reference):
            one.load_weights(iter(new), version)
        found, wanted = (run(one, requests_of(asked)) for one in (engine, reference))
        assert tokens(found) == tokens(wanted)
        assert list(found[0].log_probs) == pytest.approx(list(wanted[0].log_probs), abs=2e-4)

    update(3, 1.3)
    update(4, 0.8)
    assert (paths.count("/init_weight_transfer_engine"), paths.count("/update_weights")) == (1, 2)
    with pytest.raises(ModelError, match="are missing"):
        engine.load_weights(iter(weights(small_model)[:-1]), 5)
    update(6, 1.1)
    assert paths.count("/init_weight_transfer_engine") == 2


def test_a_new_run_starts_from_its_own_model_and_not_from_earlier_weights(server, small_model):
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


def test_a_server_with_another_model_directory_gets_the_runs_weights(server, small_model, tmp_path):
    before = connect(small_model, server)
    before.load_weights(iter(weights(small_model)), 0)
    before._engine._post("/update_weight_version", {"new_version": "default"})  # as on a server that has just started
    model = load_model(small_model).requires_grad_(False)
    for parameter in model.parameters():
        parameter.mul_(1.5)
    model.save_pretrained(tmp_path)
    asked = requests_of([[3, 4, 5], [6, 7]])

    found, wanted = run(connect(str(tmp_path), server), asked), run(make_hf(str(tmp_path)), asked)

    assert tokens(found) == tokens(wanted)
    assert list(found[0].log_probs) == pytest.approx(list(wanted[0].log_probs), abs=2e-4)


def test_an_update_left_open_by_a_killed_run_is_closed(server, small_model):
    asked = requests_of([[3, 4, 5], [6, 7]])
    first = connect(small_model, server)
    before = tokens(run(first, asked))
    first._engine._post("/pause?mode=keep")
    first._engine._post("/start_weight_update")
    first._engine._hand_over({name: tensor.detach() * 3 for name, tensor in weights(small_model)[:4]}, 0)

    assert tokens(run(connect(small_model, server), asked)) == before


def test_weights_sent_in_several_buckets_arrive_unchanged(server, small_model, monkeypatch, tmp_path):
    engine = connect(small_model, server, weights_directory=str(tmp_path))
    new = [(name, tensor.detach() * 1.3) for name, tensor in weights(small_model)]
    reference, asked = make_hf(small_model), requests_of([[3, 4, 5], [6, 7]])
    reference.load_weights(iter(new), 4)
    paths, post = [], engine._engine._post

    def watched(path, body=None):
        paths.append(path)
        return post(path, body)

    monkeypatch.setattr(engine._engine, "_post", watched)
    monkeypatch.setattr(server_module, "_MB", 100)
    engine.load_weights(iter(new), 4)

    assert paths.count("/update_weights") > 3
    assert list(tmp_path.iterdir()) == []
    found, wanted = run(engine, asked), run(reference, asked)
    assert tokens(found) == tokens(wanted)
    assert list(found[0].log_probs) == pytest.approx(list(wanted[0].log_probs), abs=2e-4)


def test_requests_in_flight_are_answered_when_an_update_fails(server, small_model):
    engine, stranger = connect(small_model, server), JsonClient(server, "vLLM", 20.0)
    body = {"token_ids": [3, 4], "sampling_params": {"max_tokens": 120, "ignore_eos": True}}

    def failing():
        yield from weights(small_model)[:3]
        raise ValueError("out of luck")

    async def go():
        engine.pause()  # so that no request finishes before
        theirs = asyncio.create_task(stranger.acall("/inference/v1/generate", body))
        ours = asyncio.ensure_future(anext(engine.generate(requests_of([[3], [4]]))))
        await asyncio.sleep(0.5)
        with pytest.raises(ValueError, match="out of luck"):
            engine.load_weights(failing(), 5)
        with pytest.raises(InfrastructureError, match="incomplete weights"):
            await asyncio.wait_for(ours, HANG_S)
        return await asyncio.wait_for(theirs, HANG_S)

    try:
        assert asyncio.run(go())["choices"][0]["finish_reason"] == "abort"
    finally:
        engine.resume()
        engine.load_weights(iter(weights(small_model)), 6)


def test_a_missing_weights_directory_is_reported(server, small_model):
    engine = connect(small_model, server)
    engine._engine._config = replace(engine._engine._config, weights_directory="/nowhere")
    with pytest.raises(InfrastructureError, match=r"rollout.weights_directory=/nowhere: .*\nType another"):
        engine.load_weights(iter(weights(small_model)), 7)


def test_a_server_with_another_precision_is_refused(server, small_model):
    config = VLLMConfig(url=server, timeout_s=HANG_S)
    with pytest.raises(ConfigError, match=r"precision float32 instead of bfloat16\n.*--precision bfloat16"):
        VLLMRollout(config, model=ModelConfig(path=small_model, precision="bfloat16"), context=RolloutContext())


def test_a_server_serves_nothing_after_an_incomplete_update(server, small_model):
    engine = connect(small_model, server)
    with pytest.raises(ModelError, match="are missing"):
        engine.load_weights(iter(weights(small_model)[:-1]), 5)

    body = {"token_ids": [3, 4], "sampling_params": {"max_tokens": 2}}
    with pytest.raises(DeadlineExceeded):
        JsonClient(server, "vLLM", 1.5).call("POST", "/inference/v1/generate", body)

    engine.load_weights(iter(weights(small_model)), 6)
    assert run(engine, requests_of([[3, 4, 5]]))[0].policy_version == 6


def test_a_paused_server_stays_paused_over_an_update(server, small_model):
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
        return await asyncio.wait_for(task, HANG_S)

    assert asyncio.run(paused())[0].policy_version == 8


def test_tokens_of_unfinished_responses_on_a_server_are_counted(server_of_llama, llama):
    engine = connect(llama, server_of_llama)
    asked = requests_of([[3]], temperature=1.0, max_response_tokens=200)
    found = asyncio.run(asyncio.wait_for(counted_tokens(engine, asked), HANG_S))

    assert found[0] < found[-2]


@pytest.mark.parametrize("pause", ["retract", "in_place"])
def test_requests_in_flight_on_a_server_are_prefilled_again_or_continue_in_place(
    server, small_model, monkeypatch, pause
):
    engine = connect(small_model, server, pause=pause)
    many, short = requests_of([[3, 4 + i] for i in range(24)], max_response_tokens=40), requests_of([[3, 4, 5]])
    posted, post = [], engine._engine._post
    monkeypatch.setattr(engine._engine, "_post", lambda path, body=None: (posted.append(path), post(path, body))[1])

    async def interrupted():
        task = asyncio.create_task(collect(engine, many))
        while not engine._engine._num_in_flight:
            await asyncio.sleep(0)
        engine.load_weights(iter(weights(small_model)), 9)
        return await asyncio.wait_for(task, HANG_S)

    samples = asyncio.run(interrupted())
    run(engine, short)
    run(engine, short)

    in_place = pause == "in_place"
    assert len(samples) == 24
    assert f"/pause?mode=keep&clear_cache={'false' if in_place else 'true'}" in posted
    assert posted.count("/reset_prefix_cache?reset_running_requests=true") == in_place, (
        "once, when the last that used the old ones has ended"
    )


@pytest.mark.parametrize("pause", ["retract", "in_place"])
def test_every_token_from_a_server_has_the_version_of_the_weights_that_sampled_it(server_of_llama, llama, pause):
    engine, flatter = connect(llama, server_of_llama, pause=pause), flattened(llama)
    prompts = [[3 + i] for i in range(9)]
    short, *long = requests_of(prompts, temperature=1.0, max_response_tokens=100)
    short = replace(short, sampling=replace(short.sampling, max_response_tokens=2))

    async def updated_after_the_first():
        samples = []
        async for sample in engine.generate([short, *long]):
            if not samples:
                engine.load_weights(iter(flatter.named_parameters()), 7)
            samples.append(sample)
        return samples

    for _ in range(10):  # on a busy machine the first sample may arrive when all have finished
        engine.load_weights(iter(weights(llama)), 0)
        samples = asyncio.run(asyncio.wait_for(updated_after_the_first(), HANG_S))
        cut = [sample for sample in samples if sample.token_versions]
        if cut:
            break

    assert cut, "no response was in flight during the update"
    for sample in cut:
        prompt = prompts[sample.request_id]
        log_probs = {0: teacher_forced(load_model(llama), prompt, sample), 7: teacher_forced(flatter, prompt, sample)}
        of_its_version = [log_probs[version][i] for i, version in enumerate(sample.token_versions)]
        assert list(sample.log_probs) == pytest.approx(of_its_version, abs=2e-4)


def test_a_server_that_keeps_the_cache_of_old_weights_serves_nothing(server, small_model, monkeypatch):
    engine = connect(small_model, server, pause="in_place")
    monkeypatch.setattr(engine._engine, "_stale", True)
    monkeypatch.setattr(engine._engine, "_post", lambda path, body=None: {"success": False})
    with pytest.raises(InfrastructureError, match="did not drop the KV cache"):
        run(engine, requests_of([[3, 4, 5]]))


def test_a_server_with_another_model_is_refused(server, story_model):
    with pytest.raises(
        ConfigError, match=r"different model.*architecture Qwen2ForCausalLM instead of LlamaForCausalLM"
    ):
        connect(story_model, server)


def test_the_number_of_servers_must_equal_the_number_of_ranks(small_model):
    with pytest.raises(ConfigError, match="names 2 servers, but the rollout's pool has 1 ranks"):
        connect(small_model, "http://a:1, http://b:2")


def test_an_unreachable_server_is_reported_with_the_command_that_starts_it(small_model):
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

    with pytest.raises(InfrastructureError, match="incomplete response from the vLLM server"):
        asyncio.run(asyncio.wait_for(generate_and_kill(), HANG_S))


def test_a_server_killed_while_weights_are_broadcast_is_an_error_and_serves_nothing(mortal, small_model, monkeypatch):
    process, url = mortal
    engine = connect(small_model, url, weights="broadcast")
    engine.load_weights(iter(weights(small_model)), 1)

    def dying():
        pairs = weights(small_model)
        yield from pairs[:6]
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(HANG_S)
        yield from pairs[6:]

    monkeypatch.setattr(server_module, "_MB", 100)
    with pytest.raises(InfrastructureError, match="incomplete response from the vLLM server"):
        engine.load_weights(dying(), 2)
    with pytest.raises(InfrastructureError, match="incomplete weights"):
        run(engine, requests_of([[3, 4]]))


def test_a_server_killed_while_weights_arrive_is_an_error_and_serves_nothing(mortal, small_model, monkeypatch):
    process, url = mortal
    engine = connect(small_model, url)
    arrived, hand_over = [], engine._engine._hand_over

    def dying(bucket, number):
        hand_over(bucket, number)
        arrived.append(number)
        if number == 1:
            os.killpg(process.pid, signal.SIGKILL)

    monkeypatch.setattr(server_module, "_MB", 100)
    monkeypatch.setattr(engine._engine, "_hand_over", dying)
    with pytest.raises(InfrastructureError, match="incomplete response from the vLLM server"):
        engine.load_weights(iter(weights(small_model)), 1)
    assert arrived == [0, 1]
    with pytest.raises(InfrastructureError, match="incomplete weights"):
        run(engine, requests_of([[3, 4]]))


def test_a_run_sends_weights_to_a_server_while_it_generates(tmp_path):
    process, url = start(locate("quickstart:model"), tmp_path / "log")
    try:
        check_async(tmp_path, f"rollout.url={url}", "pools.rollout.device=cpu")
    finally:
        end(process)
