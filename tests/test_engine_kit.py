"""Parts of rollouts on other engines: settings, places of ranks, the serve command, buckets and versions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from packaging.requirements import Requirement

from rlcore.errors import ConfigError, InfrastructureError
from rlcore.kits.engine import serve as serve_module
from rlcore.kits.engine.buckets import buckets, naming_directory
from rlcore.kits.engine.config import EngineConfig
from rlcore.kits.engine.install import EngineMissing, check_version, wanted_version
from rlcore.kits.engine.memory import cache_bytes, start_advice, taken_bytes
from rlcore.kits.engine.ranks import engine_mesh, server_client, server_url
from rlcore.kits.engine.serve import flags, serve
from rlcore.protocols.rollout import RolloutContext


@dataclass(frozen=True, slots=True, kw_only=True)
class DiceConfig(EngineConfig):
    ENGINE: ClassVar = "Dice"
    SERVE: ClassVar = "dice.serve"
    PORT: ClassVar = 7000
    SET_BY_RLCORE: ClassVar = {"batch": "rollout.max_batch_size", "seed": ""}
    OF_BOTH: ClassVar = (*EngineConfig.OF_BOTH, "fair")
    OF_ENGINE: ClassVar = (*EngineConfig.OF_ENGINE, "python")

    gpu_memory_utilization: float = 0.5
    fair: bool = True
    python: str = ""


@pytest.mark.parametrize(
    ("settings", "message", "advice"),
    [
        ({"tensor_parallel": 0}, "tensor_parallel: expected 1 or more, got 0", "tensor_parallel=1"),
        ({"max_batch_size": 0}, "max_batch_size: expected 1 or more, got 0", "max_batch_size=256"),
        ({"gpu_memory_utilization": 1.0}, "expected a number between 0 and 1", "gpu_memory_utilization=0.5"),
        ({"kv_cache_gb": -1}, "kv_cache_gb: expected 0 (automatic) or more", "kv_cache_gb=0"),
        ({"timeout_s": 0}, "timeout_s: expected more than 0", "timeout_s=600"),
        ({"url": "host:7000"}, "url: expected an address such as http://host:7000", "url=http://localhost:7000"),
        (
            {"url": "http://a:1", "tensor_parallel": 2},
            "tensor_parallel: expected 1 with rollout.url, because it is set when the server starts, got 2",
            "tensor_parallel=1",
        ),
        ({"url": "http://a:1", "engine_options": {"x": 1}}, "engine_options: expected {}", "engine_options={}"),
        ({"url": "http://a:1", "python": "p"}, "python: expected '' with rollout.url", "python="),
        ({"engine_options": {"batch": 1}}, "batch is set by rlcore", "rollout.max_batch_size=…"),
        ({"engine_options": {"seed": 1}}, "seed is set by rlcore", "Leave engine_options.seed out."),
    ],
)
def test_invalid_settings_are_refused_with_what_to_type(settings, message, advice):
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        DiceConfig(**settings)
    assert advice in str(caught.value).partition("\n")[2]


def test_a_client_may_have_the_settings_that_are_not_fixed_by_its_server():
    config = DiceConfig(url="http://a:1/, https://b:2", max_batch_size=3, max_model_len=9, fair=False, bucket_mb=1)

    assert config.urls == ["http://a:1", "https://b:2"]


@pytest.mark.parametrize(("rank", "dp_rank", "returns"), [(0, 0, True), (1, 0, False), (2, 1, True), (3, 1, False)])
def test_consecutive_ranks_share_an_engine_and_only_the_first_returns_samples(rank, dp_rank, returns):
    mesh = engine_mesh(DiceConfig(tensor_parallel=2), RolloutContext(rank=rank, world_size=4))

    assert (mesh.dp_rank, mesh.dp_size, mesh.returns) == (dp_rank, 2, returns)


def test_each_rank_has_its_own_server_whatever_tensor_parallel_is():
    config = DiceConfig(url="http://a:1,http://b:2")
    object.__setattr__(config, "tensor_parallel", 2)
    contexts = [RolloutContext(rank=rank, world_size=2) for rank in range(2)]

    places = [engine_mesh(config, context) for context in contexts]
    assert [(place.dp_rank, place.dp_size, place.returns) for place in places] == [(0, 2, True), (1, 2, True)]
    assert [server_url(config, context) for context in contexts] == ["http://a:1", "http://b:2"]


def test_an_engine_size_that_does_not_divide_the_pool_is_refused():
    message = r"tensor_parallel=3 does not divide the 4 ranks[\s\S]*tensor_parallel=4 .*\(1, 2, 4 are possible\)"
    with pytest.raises(ConfigError, match=message):
        engine_mesh(DiceConfig(tensor_parallel=3), RolloutContext(rank=0, world_size=4))


def test_the_number_of_servers_must_equal_the_number_of_ranks():
    with pytest.raises(ConfigError, match=r"names 2 servers, but .* has 1 ranks\n.*devices_per_node=2"):
        server_url(DiceConfig(url="http://a:1, http://b:2"), RolloutContext())


def test_an_unreachable_server_is_reported_with_the_command_that_starts_it(monkeypatch):
    monkeypatch.setenv("DICE_KEY", "abc")
    client = server_client(DiceConfig(api_key_variable="DICE_KEY", timeout_s=5), "http://127.0.0.1:9")

    assert client.headers == {"Authorization": "Bearer abc"}
    with pytest.raises(InfrastructureError, match=r"the Dice server at .*\n.*python -m dice.serve MODEL --port PORT"):
        client.call("GET", "/")


@pytest.fixture
def model(tmp_path):
    """Return a directory that looks like a model."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).touch()
    return str(tmp_path)


@pytest.fixture
def started(monkeypatch):
    """Record the command lines and environments of processes that would replace this one."""
    found = []

    def execve(python, words, variables):
        found.append((words[1:], variables))

    monkeypatch.setattr(serve_module.os, "execve", execve)
    return found


def test_a_server_starts_with_the_settings_typed_and_with_its_own_options(started, model):
    asked = []

    def command(options):
        asked.append(options)
        return ["-m", "dice"], {"A": "1"}

    typed = [
        "--port",
        "7001",
        "--tensor-parallel",
        "2",
        "--fair",
        "false",
        "--max-batch-size",
        "8",
        "--",
        "--color",
        "red",
    ]
    serve([model, *typed], DiceConfig, command, "")

    assert started == [(["-m", "dice", "--color", "red"], {"A": "1"})]
    assert asked[0].config == DiceConfig(tensor_parallel=2, fair=False, max_batch_size=8)
    assert (asked[0].host, asked[0].port, asked[0].model.precision) == ("127.0.0.1", 7001, "float32")


def test_unknown_options_go_to_the_server(started, model):
    serve([model, "--python", "p"], DiceConfig, lambda options: ([], {}), "")

    assert started == [(["--python", "p"], {})], "a server has no such setting"


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["/nowhere"], "dice.serve: MODEL=/nowhere"),
        (["MODEL", "--tensor-parallel", "0"], "dice.serve: tensor_parallel"),
    ],
)
def test_an_error_of_the_serve_command_has_no_traceback(started, model, typed, message):
    typed = [model if word == "MODEL" else word for word in typed]
    with pytest.raises(SystemExit, match=message):
        serve(typed, DiceConfig, lambda options: ([], {}), "")
    assert started == []


@pytest.mark.parametrize(
    ("negate", "no"), [(True, ["--no-eager"]), (False, [])], ids=["False is negated", "False is left out"]
)
def test_arguments_of_an_engine_become_flags(negate, no):
    options = {"tp_size": 2, "fast": True, "eager": False, "seed": None, "loaders": ["a", "b"], "more": {"x": 1}}

    written = flags(options, negate=negate)

    assert written == ["--tp-size", "2", "--fast", *no, "--loaders", "a", "b", "--more", '{"x": 1}']


def test_buckets_hold_copies_of_at_most_their_size_unless_one_tensor_is_larger():
    borrowed = torch.zeros(8)
    weights = iter([("a", borrowed[:2]), ("b", borrowed[2:4]), ("c", borrowed), ("d", borrowed[:1])])

    found = list(buckets(weights, 16))
    borrowed.fill_(1.0)

    assert [list(bucket) for bucket in found] == [["a", "b"], ["c"], ["d"]]
    assert all(not tensor.any() for bucket in found for tensor in bucket.values())


def test_an_error_of_a_weight_file_names_the_directory():
    error = pytest.raises(InfrastructureError, match=r"weights_directory=/nowhere: .*\nType another")
    with error, naming_directory("/nowhere"):
        Path("/nowhere/weights").touch()


@pytest.mark.parametrize(
    ("settings", "device", "taken"),
    [
        ({}, 0, 30),
        ({}, 1000, 500),
        ({"gpu_memory_utilization": 0.25}, 1000, 250),
        ({"kv_cache_gb": 1}, 1000, 10 + 2**29),
        ({"url": "http://a:1"}, 1000, 0),
    ],
)
def test_engine_memory_follows_the_settings(settings, device, taken):
    assert taken_bytes(DiceConfig(**settings), 10, 20, device=device, num_sharing=2) == taken


def test_a_cache_is_enough_for_all_sequences_and_at_most_a_quarter_of_the_free_memory():
    def size(free=2**40, **settings):
        return cache_bytes(DiceConfig(**settings), free=free, context_length=100, spare_tokens=28, token_bytes=512)

    assert size(max_batch_size=3) == 3 * 128 * 512
    assert size(max_batch_size=3, free=8 * 128 * 512) == 2 * 128 * 512
    assert size(kv_cache_gb=0.5) == 2**29
    with pytest.raises(ConfigError, match=r"100 tokens × 512 bytes = .*kv_cache_gb=1e-05 is .*\n.*kv_cache_gb=6.1e-05"):
        size(kv_cache_gb=1e-5)
    with pytest.raises(ConfigError, match="are free"):
        size(kv_cache_gb=1, free=2**29)


@pytest.mark.parametrize(
    ("cause", "advice"),
    [
        ("CUDA out of memory. Tried to allocate", "rollout.gpu_memory_utilization=…  (now 0.5)"),
        ("the cache is too small … Try decreasing `max_model_len`", "rollout.max_model_len=4096"),
        ("no such architecture", "rollout=hf"),
    ],
)
def test_a_start_that_runs_out_of_memory_suggests_another_memory_setting(cause, advice):
    suggested = start_advice(cause, DiceConfig())

    assert advice in suggested and ("rollout=hf" in suggested) == (advice == "rollout=hf")


@pytest.mark.parametrize(
    ("wanted", "packages", "message"),
    [
        ("pluggy<0.1", ["pluggy"], r"rollout=dice requires pluggy<0.1, but pluggy \S+ is installed\nType this"),
        ("dice>=1", ["dice", "dice-cpu"], r"rollout=dice needs Dice, which is not installed in \S+\nType this"),
    ],
)
def test_a_missing_or_unsupported_engine_is_refused_with_the_command_to_type(wanted, packages, message):
    with pytest.raises(EngineMissing, match=message):
        check_version("dice", "Dice", Requirement(wanted), packages, "Type this")


def test_the_first_installed_package_counts_and_its_range_is_that_of_the_plugin():
    wanted = wanted_version("rlcore", "pluggy")

    assert str(wanted) == "pluggy>=1.7"
    assert check_version("dice", "Dice", wanted, ["dice", "pluggy"], "") == metadata.version("pluggy")
