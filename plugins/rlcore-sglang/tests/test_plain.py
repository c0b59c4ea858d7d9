"""Tests without an engine: settings, requests, interrupted responses, buckets of weights, versions."""

import contextlib
import json
import math
import pickle
import subprocess
import sys

import pytest
import torch
from rlcore_sglang import SGLangConfig, loader, serve
from rlcore_sglang.install import check_installed, wanted_version
from rlcore_sglang.own import _cache_tokens, engine_environment, engine_options, last_error
from rlcore_sglang.requests import Answer, Response, sampling_params
from rlcore_sglang.rollout import SGLangRollout
from rlcore_sglang.weights import NO_VERSION, _SharedFile, pieces, send

from rlcore.cli import main
from rlcore.config.build import build
from rlcore.controller.pool import RuntimeConfig
from rlcore.errors import ConfigError, InfrastructureError, NumericalError, SampleError
from rlcore.kits.engine import install
from rlcore.kits.engine import serve as kit
from rlcore.kits.engine.checks import Limits
from rlcore.kits.engine.install import EngineMissing
from rlcore.protocols.backend import ModelConfig
from rlcore.protocols.rollout import RolloutContext
from rlcore.testing.waiting import HANG_S
from rlcore.types import Request, Sampling

LIMITS = Limits(vocab_size=32, context_length=64, end_ids=(1,))
STOP, LENGTH, ABORT = ({"type": kind} for kind in ("stop", "length", "abort"))


def test_engine_has_less_time_to_start_than_its_worker():
    assert SGLangConfig().start_timeout_s < RuntimeConfig().start_timeout_s


def ask(num_prompt=3, **sampling):
    return Request(
        request_id=7, prompt_ids=[2 + i % 30 for i in range(num_prompt)], sampling=Sampling(**sampling), seed=5
    )


@pytest.mark.parametrize(
    ("typed", "message", "to_type"),
    [
        ({"tensor_parallel": 0}, "rollout.tensor_parallel: expected 1 or more, got 0", "rollout.tensor_parallel=1"),
        ({"gpu_memory_utilization": 1.0}, "expected a number between 0 and 1", "rollout.gpu_memory_utilization=0.85"),
        ({"url": "host:30000"}, "rollout.url: expected an address", "rollout.url=http://localhost:30000"),
        ({"router": "http://host:1"}, "rollout.router: url is empty", "rollout.url="),
        ({"engine_options": {"dp_size": 2}}, "SGLang cannot update their weights", "placement=split"),
        ({"engine_options": {"tp_size": 2}}, "tp_size is set by rlcore", "rollout.tensor_parallel="),
        ({"engine_options": {"pp_size": 2}}, "pp_size is set by rlcore", "rollout.tensor_parallel="),
        ({"engine_options": {"weight_version": "a"}}, "weight_version is set by rlcore", "Leave engine_options"),
        ({"url": "http://a:1", "tensor_parallel": 2}, "expected 1 with rollout.url", "rollout.tensor_parallel=1"),
        ({"url": "http://a:1", "engine_options": {"x": 1}}, "engine_options: expected {}", "engine_options={}"),
        ({"url": "http://a:1", "python": "p"}, "because it is set when the server starts, got p", "rollout.python="),
        ({"pause": "later"}, "rollout.pause", "retract"),
    ],
)
def test_invalid_settings_are_refused_with_what_to_type(typed, message, to_type):
    with pytest.raises(ConfigError) as caught:
        build(SGLangConfig, typed, "rollout")
    first, _, second = str(caught.value).partition("\n")
    assert message in first
    assert to_type in first + second


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_an_engine_option_that_rlcore_sets_cannot_be_given(small_model, device):
    context = RolloutContext(device=device)
    set_here = engine_options(SGLangConfig(), ModelConfig(path=small_model), context, LIMITS).keys()
    free = {"grammar_backend", "random_seed", "log_level", "attention_backend", "sleep_on_idle"}
    assert set_here - free <= SGLangConfig.SET_BY_RLCORE.keys()


def test_a_fixed_cache_size_is_refused_on_a_gpu(small_model):
    config, context = SGLangConfig(kv_cache_gb=2), RolloutContext(device="cuda:0")
    with pytest.raises(ConfigError, match=r"rollout.kv_cache_gb=2: .*\n.*rollout.gpu_memory_utilization"):
        engine_options(config, ModelConfig(path=small_model), context, LIMITS)


def test_float32_on_a_gpu_is_refused_without_an_attention_backend(small_model):
    exact, triton = ModelConfig(path=small_model), SGLangConfig(engine_options={"attention_backend": "triton"})
    with pytest.raises(ConfigError, match=r"model.precision=float32: .*\nType  model.precision=bfloat16 .*=triton$"):
        SGLangRollout.check_model(SGLangConfig(), model=exact, device="cuda")
    with pytest.raises(ConfigError, match=r"model\.precision=float32"):
        SGLangRollout(SGLangConfig(), model=exact, context=RolloutContext(device="cuda:0"))

    SGLangRollout.check_model(triton, model=exact, device="cuda")
    SGLangRollout.check_model(SGLangConfig(), model=exact, device="cpu")
    SGLangRollout.check_model(SGLangConfig(url="http://a:1"), model=exact, device="cuda")
    options = engine_options(triton, exact, RolloutContext(device="cuda:0"), LIMITS)
    assert (options["dtype"], options["attention_backend"]) == ("float32", "triton")


def test_a_server_in_float32_on_a_gpu_is_refused(small_model, monkeypatch):
    monkeypatch.setattr(kit, "_device", lambda: "cuda:0")
    monkeypatch.setattr(serve, "check_installed", lambda **needs: None)
    started = []
    monkeypatch.setattr(kit.os, "execve", lambda python, command, variables: started.append(command))

    with pytest.raises(SystemExit, match=r"--precision float32: .*\nType  --precision bfloat16 "):
        serve.main([small_model])
    serve.main([small_model, "--precision", "bfloat16"])
    serve.main([small_model, "--", "--attention-backend", "triton"])

    assert len(started) == 2


def test_an_environment_variable_that_changes_log_probs_does_not_reach_the_engine(monkeypatch):
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    assert "SGLANG_RETURN_ORIGINAL_LOGPROB" not in engine_environment(SGLangConfig(), RolloutContext(), [])


@pytest.mark.parametrize(
    ("setting", "device", "taken"),
    [
        ({}, 0, 30),
        ({}, 1000, 850),
        ({"gpu_memory_utilization": 0.5}, 1000, 500),
        ({"kv_cache_gb": 1, "tensor_parallel": 2}, 0, 10 + 2**29),
        ({"url": "http://a:1"}, 1000, 0),
    ],
)
def test_engine_memory_follows_the_settings(setting, device, taken, monkeypatch):
    monkeypatch.setattr(install, "installed_version", lambda name: "0.5.21")
    assert SGLangRollout.engine_bytes(SGLangConfig(**setting), 10, 20, device=device) == taken


@pytest.mark.parametrize("way", ["memory", "disk"])
def test_a_missing_weights_directory_is_reported(small_model, way):
    config = SGLangConfig(weights_directory="/nowhere", weights=way)
    with pytest.raises(InfrastructureError, match=r"rollout.weights_directory=/nowhere: .*\nType another"):
        send(Recording(), iter([("a", torch.ones(4))]), 3, config=config, device="cpu", path=small_model)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (ask(num_prompt=0), "request 7 has an empty prompt"),
        (Request(request_id=7, prompt_ids=[32], sampling=Sampling(), seed=0), "token id 32 is not among the 32"),
        (ask(max_response_tokens=0), "max_response_tokens=0"),
        (Request(request_id=7, prompt_ids=[2] * 64, sampling=Sampling(), seed=0), "data.max_prompt_tokens=63"),
    ],
)
def test_a_request_that_cannot_run_is_refused_with_its_id(request_, message):
    with pytest.raises(SampleError, match=message):
        LIMITS.room(request_)


def test_a_response_ends_at_the_context_length():
    assert LIMITS.room(ask(num_prompt=60, max_response_tokens=10)) == 4
    assert LIMITS.room(ask(num_prompt=60, max_response_tokens=3)) == 3


def test_a_request_is_converted_to_sglangs_sampling_params():
    asked = ask(temperature=0.5, top_p=0.9, stop=("x",), stop_token_ids=(9,), max_response_tokens=6)

    params = sampling_params(Response(asked, 6), LIMITS, SGLangConfig())

    assert params == {
        "temperature": 0.5,
        "top_k": -1,  # rlcore's 0
        "top_p": 0.9,
        "min_p": 0.0,
        "max_new_tokens": 6,
        "stop_token_ids": [1, 9],
        "skip_special_tokens": False,
        "sampling_seed": 5,
        "stop": ["x"],
        "no_stop_trim": True,
    }


def test_min_p_with_seeds_is_refused():
    response = Response(ask(min_p=0.1), 6)
    with pytest.raises(ConfigError, match=r"rollout.deterministic=false"):
        sampling_params(response, LIMITS, SGLangConfig())
    params = sampling_params(response, LIMITS, SGLangConfig(deterministic=False))
    assert params["min_p"] == 0.1 and "sampling_seed" not in params


def test_an_aborted_part_becomes_prompt_and_stays_in_the_sample():
    response = Response(ask(max_response_tokens=5), 5)

    response.add(Answer([11, 12], [-0.5, -1.0], ABORT, [3, 3]))
    assert response.prompt_ids == [2, 3, 4, 11, 12]
    assert sampling_params(response, LIMITS, SGLangConfig())["max_new_tokens"] == 3
    last = Answer([13], [-2.0], STOP, [4])
    response.add(last)

    sample = response.sample(last, 4)
    assert (list(sample.token_ids), list(sample.log_probs)) == ([11, 12, 13], [-0.5, -1.0, -2.0])
    assert (sample.finish_reason, sample.policy_version, list(sample.token_versions)) == ("stop", 4, [3, 3, 4])


def test_a_response_aborted_at_its_maximum_length_ends_by_length():
    response, answer = Response(ask(max_response_tokens=1), 1), Answer([11], [-0.5], ABORT, [3])
    response.add(answer)
    assert response.sample(answer, 3).finish_reason == "length"


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (Answer([4], [math.nan], STOP, [0]), NumericalError, "request 7: .* not finite at position 3"),
        (Answer([4, 5], [-1.0], STOP, [0, 0]), SampleError, "request 7: SGLang returned 2 tokens, 1 log-probs and 2"),
        (
            Answer([], [], ABORT | {"status_code": 400, "message": "too long"}, []),
            SampleError,
            "request 7: refused by SGLang: too long",
        ),
    ],
)
def test_invalid_answers_are_errors(answer, error, message):
    with pytest.raises(error, match=message):
        Response(ask(), 6).add(answer)


def test_every_token_has_the_version_that_sampled_it():
    meta = {
        "finish_reason": LENGTH,
        "weight_version": "9",
        "weight_versions": [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}],
        "output_token_logprobs": [(-0.5, 11, None), (-1.0, 12, None)],
    }
    answer = Answer.read({"output_ids": [11, 12], "meta_info": meta})
    assert answer == Answer([11, 12], [-0.5, -1.0], LENGTH, [3, 4])


class Recorder:
    """A model that keeps the weights its loader receives."""

    def __init__(self):
        self.found = {}

    def load_weights(self, weights):
        self.found |= {name: tensor.clone() for name, tensor in weights}


@pytest.mark.parametrize("limit", [1, 78, 10**6], ids=["each alone", "several pieces", "one piece"])
def test_buckets_transfer_every_tensor_bit_for_bit(tmp_path, limit):
    torch.manual_seed(0)
    shapes = {"a": (3, 5), "b": (7,), "c": (2, 2, 2), "d": (1,)}
    dtypes = {"a": torch.float32, "b": torch.bfloat16, "c": torch.float16, "d": torch.float32}
    sent = {name: torch.randn(shape).to(dtypes[name]) for name, shape in shapes.items()}
    model, sizes = Recorder(), []

    with _SharedFile(str(tmp_path)) as memory:
        for entries in pieces(iter(sent.items()), limit, memory):
            sizes.append(len(entries))
            assert all(offset % 16 == 0 for *_, offset in entries)
            loader.load(model, pickle.loads(memory.payloads(entries, 1)[0]))
        (layout, _) = pickle.loads(memory.payloads([], 2)[1])[0]
        loader.load(model, pickle.loads(memory.payloads([], 1)[0]))

    assert json.loads(layout)["entries"] == []
    # a: 60 bytes at 0; b: 14 at 64, ends at 78; c: 16 at 80, ends at 96; d: 4 at 96, ends at 100
    assert sizes == {1: [1, 1, 1, 1], 78: [2, 2], 10**6: [4]}[limit]
    assert model.found.keys() == sent.keys()
    assert all(torch.equal(model.found[name], tensor) for name, tensor in sent.items())
    assert list(tmp_path.iterdir()) == []


class Recording:
    """An engine that records its control actions and refuses one of them."""

    num_ranks = 1

    def __init__(self, refused=""):
        self.actions, self.refused = [], refused

    def control(self, action, **fields):
        self.actions.append((action, fields.get("mode") or fields.get("new_version") or ""))
        if action == self.refused:
            raise InfrastructureError(f"{action} was refused")


BEGUN = [("pause_generation", "retract"), ("update_weight_version", NO_VERSION), ("begin_weight_update", "")]


@pytest.mark.parametrize(
    ("refused", "url", "then"),
    [
        ("", "", [("end_weight_update", ""), ("update_weight_version", "3"), ("continue_generation", "")]),
        (
            "update_weights_from_tensor",
            "",
            [
                ("end_weight_update", ""),
                ("pause_generation", "retract"),
                ("pause_generation", "abort"),
                ("continue_generation", ""),
            ],
        ),
        (
            "end_weight_update",
            "http://host:1",
            [("end_weight_update", ""), ("pause_generation", "retract"), ("pause_generation", "abort")],
        ),
    ],
    ids=["success", "bucket refused", "end refused by a server"],
)
def test_the_version_is_set_only_after_a_complete_update(tmp_path, refused, url, then):
    engine = Recording(refused)
    config = SGLangConfig(weights_directory=str(tmp_path), url=url)
    with (
        contextlib.nullcontext() if not refused else pytest.raises(InfrastructureError, match=f"{refused} was refused")
    ):
        send(engine, iter([("a", torch.ones(4))]), 3, config=config, device="cpu", path="")

    assert engine.actions[:3] == BEGUN
    assert [one for one in engine.actions[3:] if one[0] != "update_weights_from_tensor"] == then


def test_a_full_weights_directory_is_an_error_and_not_a_crash(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(InfrastructureError, match=r"rollout.bucket_mb=16"), _SharedFile(str(tmp_path)) as memory:
        list(pieces(iter([("a", torch.ones(4))]), 100, memory))
    assert list(tmp_path.iterdir()) == []


def test_a_cache_too_small_for_one_sequence_is_refused(small_model):
    config = SGLangConfig(kv_cache_gb=1e-6)
    with pytest.raises(ConfigError, match="one sequence needs") as caught:
        _cache_tokens(config, ModelConfig(path=small_model), LIMITS)
    assert "rollout.max_model_len=" in str(caught.value)


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        ({}, "needs SGLang, which is not installed in"),
        ({"sglang": "0.4.1"}, "requires sglang.*but sglang 0.4.1 is installed"),
    ],
)
def test_a_missing_or_unsupported_sglang_is_refused_with_the_command_to_type(monkeypatch, installed, message):
    monkeypatch.setattr(install, "installed_version", lambda name: installed.get(name, ""))
    with pytest.raises(EngineMissing, match=message) as caught:
        check_installed()
    assert f'pip install "{wanted_version()}"' in str(caught.value)
    assert "rollout.python=OTHER_ENVIRONMENT/bin/python" in str(caught.value)
    with pytest.raises(EngineMissing, match=message):
        SGLangRollout.engine_bytes(SGLangConfig(), 10, 20, device=0)
    assert SGLangRollout.engine_bytes(SGLangConfig(python="other/bin/python"), 10, 20, device=0) == 30


def test_a_gpu_without_the_kernel_package_is_refused(monkeypatch):
    monkeypatch.setattr(install, "installed_version", lambda name: {"sglang": "0.5.21"}.get(name, ""))
    assert check_installed() == "0.5.21"
    with pytest.raises(EngineMissing, match="sglang-kernel on a GPU, which is not installed"):
        check_installed(needs_kernels=True)


def test_the_last_exception_in_a_log_is_reported_as_the_cause():
    log = "Traceback\nValueError: first\n  File x\nAssertionError: second\nshutting down: done"
    assert last_error(log, "?") == "AssertionError: second"
    assert last_error("nothing here", "exit code 1") == "exit code 1"


def test_weights_that_arrive_while_ranks_work_in_lockstep_are_refused(capsys, tmp_path):
    settings = ["preset=quickstart", "rollout=sglang", "schedule=async", "placement=split", f"run.directory={tmp_path}"]
    two = ["rollout.tensor_parallel=2", "pools.rollout.devices_per_node=2"]

    assert main(["train", *settings, *two, "--dry-run"]) == 2
    assert (
        "if rollout.tensor_parallel=2, as its ranks work in lockstep\nType  schedule=pipelined"
        in capsys.readouterr().err
    )
    assert main(["train", *settings, "--dry-run"]) == 0


def test_a_lost_scheduler_is_reported_after_the_exception_before_it():
    lost = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:1"
    assert last_error(f"ValueError: a\nOSError: b\n{lost}\n{lost}", "?") == f"OSError: b, then {lost}"
    assert last_error(lost, "?") == lost
    assert last_error(f"{lost}\nOSError: b", "?") == "OSError: b"


def test_selecting_the_plugin_imports_neither_sglang_nor_torch():
    code = "import sys, rlcore_sglang; print([name for name in ('sglang', 'transformers') if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S, check=True)
    assert found.stdout.strip() == "[]"
