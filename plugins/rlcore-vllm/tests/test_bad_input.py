"""Errors that are reported before an engine runs."""

import re

import pytest
from conftest import make_vllm, requests_of
from models import save_tiny
from rlcore_vllm import VLLMConfig, VLLMRollout, host, install
from rlcore_vllm.inprocess import _cache_bytes, engine_options
from rlcore_vllm.requests import sample

from rlcore.cli import main
from rlcore.errors import ConfigError, ModelError
from rlcore.kits.engine.install import EngineMissing
from rlcore.protocols.backend import ModelConfig
from rlcore.protocols.rollout import RolloutContext


@pytest.mark.parametrize(
    ("setting", "device", "taken"),
    [
        ({}, 0, 30),
        ({}, 1000, 900),
        ({"gpu_memory_utilization": 0.5}, 1000, 500),
        ({"kv_cache_gb": 1, "tensor_parallel": 2}, 1000, 10 + 2**30),
        ({"url": "http://a:1"}, 1000, 0),
    ],
)
def test_engine_memory_follows_the_settings(setting, device, taken):
    assert VLLMRollout.engine_bytes(VLLMConfig(**setting), 10, 20, device=device) == taken


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ({"tensor_parallel": 0}, "tensor_parallel: expected 1 or more, got 0"),
        ({"max_batch_size": 0}, "max_batch_size: expected 1 or more, got 0"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization: expected a number between 0 and 1, got 1.5"),
        (
            {"url": "http://a:1", "tensor_parallel": 2},
            "tensor_parallel: expected 1 with rollout.url, because it is set when the server starts, got 2",
        ),
        ({"url": "http://a:1", "engine_options": {"x": 1}}, "engine_options: expected {} with rollout.url"),
        ({"url": "localhost:8000"}, "url: expected an address such as http://host:8000, got 'localhost:8000'"),
    ],
)
def test_a_setting_out_of_range_is_refused(setting, text):
    with pytest.raises(ConfigError, match=re.escape(text)) as error:
        VLLMConfig(**setting)
    assert "\nType  " in str(error.value)


@pytest.mark.parametrize(
    ("name", "advice"), [("max_num_seqs", r"rollout\.max_batch_size=…"), ("seed", "Leave engine_options.seed out")]
)
def test_an_engine_option_that_rlcore_sets_is_refused(name, advice):
    with pytest.raises(ConfigError, match=rf"engine_options: {name} is set by rlcore\n.*{advice}"):
        VLLMConfig(engine_options={name: 1})


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_every_engine_option_that_rlcore_sets_is_in_the_refused_ones(small_model, device):
    config, context = VLLMConfig(lora_rank=4, kv_cache_gb=1), RolloutContext(device=device, world_size=2)
    set_here = engine_options(config, ModelConfig(path=small_model, precision="bfloat16"), context).keys()
    free = {"disable_log_stats", "use_tqdm_on_load", "disable_custom_all_reduce"}
    free |= {"block_size", "enable_chunked_prefill", "max_num_batched_tokens"}
    assert set_here - free <= VLLMConfig.SET_BY_RLCORE.keys()


def test_an_engine_option_reaches_vllm(small_model):
    config = VLLMConfig(engine_options={"attention_backend": "no such backend"})
    with pytest.raises(ModelError, match="vLLM cannot serve"):
        VLLMRollout(config, model=ModelConfig(path=small_model), context=RolloutContext())


def test_weights_that_arrive_while_ranks_work_in_lockstep_are_refused(capsys, tmp_path):
    settings = ["preset=quickstart", "rollout=vllm", "schedule=async", "placement=split", f"run.directory={tmp_path}"]
    two = ["rollout.tensor_parallel=2", "pools.rollout.devices_per_node=2"]

    assert main(["train", *settings, *two, "--dry-run"]) == 2
    assert (
        "if rollout.tensor_parallel=2, as its ranks work in lockstep\nType  schedule=pipelined"
        in capsys.readouterr().err
    )
    assert main(["train", *settings, "--dry-run"]) == 0


def test_an_environment_variable_that_changes_the_engine_is_refused(monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(ConfigError, match=r"VLLM_USE_V2_MODEL_RUNNER=1: .*\nType  unset VLLM_USE_V2_MODEL_RUNNER"):
        host.set_environment("cpu")


def test_a_model_that_vllm_cannot_run_is_refused_and_another_engine_suggested(assets):
    path = assets / "models" / "stories260k"
    with pytest.raises(ModelError, match=rf"vLLM cannot serve model.path={path}: .*\n.*rollout=hf"):
        make_vllm(str(path))  # heads of 8 dimensions


def test_a_missing_model_directory_is_refused(tmp_path):
    with pytest.raises(ModelError, match="there is no such directory"):
        make_vllm(str(tmp_path / "nothing"))


def test_tensor_parallelism_must_divide_the_heads(small_model):
    with pytest.raises(
        ConfigError, match=r"tensor_parallel=3 does not divide the 2 attention heads.*\n.*1, 2 are possible"
    ):
        VLLMRollout(
            VLLMConfig(tensor_parallel=3),
            model=ModelConfig(path=small_model),
            context=RolloutContext(world_size=3),
        )


def test_a_response_aborted_before_its_first_token_becomes_an_empty_sample():
    request = requests_of([[3]])[0]
    found = sample(request, [], [], "abort", (), 5)
    assert (found.policy_version, found.finish_reason, list(found.token_ids)) == (5, "abort", [])


def test_a_cache_too_small_for_one_sequence_is_refused_with_the_calculation(small_model, tmp_path):
    # 2 layers × 2 (keys, values) × 1 head × 32 dimensions × 4 bytes = 512 bytes per token; a sequence of 128 tokens and
    # two blocks of 128 make 384 tokens, 196608 bytes. 0.0001 GB is 107374 bytes: 209 tokens, minus two blocks.
    model = ModelConfig(path=save_tiny("Llama", tmp_path, small_model))
    assert _cache_bytes(VLLMConfig(max_batch_size=3), model, 128) == 3 * 196608
    assert _cache_bytes(VLLMConfig(kv_cache_gb=0.5), model, 128) == 2**29
    with pytest.raises(
        ConfigError, match=r"128 tokens × 512 bytes = 192.0 KB, .*kv_cache_gb=0.0001 is 104.9 KB"
    ) as error:
        _cache_bytes(VLLMConfig(kv_cache_gb=0.0001), model, 128)
    assert "rollout.kv_cache_gb=0.00018" in str(error.value)
    with pytest.raises(ConfigError, match="are free"):
        _cache_bytes(VLLMConfig(kv_cache_gb=1e6), model, 128)


def plant(directory, name, version):
    folder = directory / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_an_unsupported_version_of_vllm_is_refused_with_the_command_to_type(tmp_path, monkeypatch):
    plant(tmp_path, "vllm", "0.99.0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EngineMissing, match=r"requires vllm<0.33,>=0.32, but vllm 0.99.0 is installed\n.*pip install"):
        install.check_installed()


def test_either_distribution_of_vllm_is_accepted(tmp_path, monkeypatch):
    assert install.check_installed().startswith("0.32")
    plant(tmp_path, "vllm", "0.32.7")
    monkeypatch.syspath_prepend(tmp_path)
    assert install.check_installed() == "0.32.7"


def test_missing_vllm_is_reported_with_the_command_to_type(monkeypatch):
    monkeypatch.setattr(install, "_PACKAGES", ("no-such-distribution",))
    with pytest.raises(EngineMissing, match=r'not installed in \S+\nType  pip install "vllm<0.33,>=0.32"'):
        install.check_installed()
    with pytest.raises(EngineMissing):
        VLLMRollout.engine_bytes(VLLMConfig(), 10, 20, device=0)
    assert VLLMRollout.engine_bytes(VLLMConfig(url="http://a:1"), 10, 20, device=0) == 0
