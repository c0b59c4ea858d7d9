"""model.overrides: other values in config.json, the same for training, generation, checkpoints and exported models."""

import json
from pathlib import Path

import pytest
import torch

import rlcore
from rlcore.errors import ConfigError, ModelError
from rlcore.models.load import load_model, load_tokenizer, read_config
from rlcore.models.overrides import override_config
from rlcore.testing.training import save_model

IDS = torch.arange(3, 43)[None]


@pytest.fixture
def path(tmp_path):
    return save_model("llama", tmp_path / "model")


def test_the_model_computes_with_the_new_values(path, tmp_path):
    theta = {"rope_parameters": {"rope_theta": 100.0}}

    changed = override_config(path, theta, tmp_path / "cache")

    assert read_config(changed).rope_parameters == {"rope_type": "default", "rope_theta": 100.0}
    before, after = (load_model(it)(IDS).logits for it in (path, changed))
    assert float((before - after).detach().abs().max()) > 1e-3
    weights = [load_model(it).state_dict() for it in (path, changed)]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


def test_a_directory_is_made_once_and_its_own_values_need_none(path, tmp_path):
    values = {"max_position_embeddings": 77}

    first, second = (override_config(path, values, tmp_path / "cache") for _ in range(2))

    assert first == second
    assert [it.name for it in (tmp_path / "cache" / "models").iterdir()] == [first.rpartition("/")[2]]
    assert override_config(first, values, tmp_path / "cache") == first
    assert override_config(path, {"max_position_embeddings": 78}, tmp_path / "cache") != first


def test_a_file_of_an_earlier_transformers_keeps_its_names(path, tmp_path):
    file = Path(path, "config.json")
    config = json.loads(file.read_text())
    del config["rope_parameters"]
    file.write_text(json.dumps(config | {"rope_theta": 10000.0}))

    changed = override_config(path, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, tmp_path / "cache")

    assert read_config(changed).rope_parameters == {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(ConfigError, match=r"config\.json has no 'rope_parameters'"):
        override_config(path, {"rope_parameters": {"rope_theta": 5.0}}, tmp_path / "cache")


def test_a_mapping_changes_only_the_values_that_it_names(path, tmp_path):
    scaling = {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}

    changed = json.loads(Path(override_config(path, scaling, tmp_path), "config.json").read_text())

    before = json.loads(Path(path, "config.json").read_text())
    assert changed["rope_parameters"] == before["rope_parameters"] | scaling["rope_parameters"]
    assert {**changed, "rope_parameters": 0} == {**before, "rope_parameters": 0}


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"rope_tetha": 1.0, "x": 1}, ConfigError, r"model.overrides.rope_tetha: config.json has no 'rope_tetha'\."),
        ({"max_position_embedding": 9}, ConfigError, r"Did you mean 'max_position_embeddings'\?\nThere are: "),
        ({"dtype": "float16"}, ConfigError, r"overrides.dtype has no effect: .*\nType  model.precision=bfloat16"),
        (
            {"max_position_embeddings": {"a": 1}},
            ConfigError,
            r"expected a value such as \d+, got a mapping\nType  model",
        ),
        ({"max_position_embeddings": "many"}, ModelError, "config.json cannot be used: .*max_position_embeddings"),
    ],
)
def test_values_that_the_model_does_not_have_are_refused(values, error, message, path, tmp_path):
    with pytest.raises(error, match=message):
        override_config(path, values, tmp_path / "cache")

    assert not list((tmp_path / "cache").glob("models/*"))


def test_training_generation_and_the_exported_model_use_the_values(tmp_path):
    small = {
        "runtime": "local",
        "trackers": "jsonl",
        "trainer.steps": 1,
        "trainer.prompts_per_step": 16,
        "eval.every_steps": 0,
    }
    values = {"rope_parameters": {"rope_theta": 5000.0}}

    plain, changed = (
        rlcore.train(settings={"preset": "quickstart", **small, "run.directory": str(tmp_path / name), **more})
        for name, more in {"plain": {}, "changed": {"model.overrides": values}}.items()
    )
    exported = changed.export(tmp_path / "out")

    assert changed.metrics[-1]["actor/rollout_logprob_gap"] < 1e-5
    assert changed.metrics[-1]["actor/entropy"] != plain.metrics[-1]["actor/entropy"]
    assert read_config(exported).rope_parameters["rope_theta"] == 5000.0
    assert load_tokenizer(str(exported)) is not None


def test_a_loaded_model_has_its_own_configuration(assets):
    story_model = str(assets / "models" / "stories260k")
    model, tokenizer = load_model(story_model), load_tokenizer(story_model)
    settings = {"model.overrides.max_position_embeddings": 40, "runtime": "local"}

    with pytest.raises(ConfigError, match=r"is a loaded one\nSet it before.*model.config.max_position_embeddings"):
        rlcore.plan(model=model, tokenizer=tokenizer, data=[{"prompt": "a"}], reward=len, settings=settings)
