"""Settings that do not exist: the answers to names of other frameworks and of plugins that are not chosen."""

import re
from pathlib import Path

import pytest

import rlcore.config.other_names
from rlcore.config.build import build_plugin, flatten, type_of
from rlcore.config.compose import PLUGIN_SECTIONS, compose
from rlcore.config.schema import Choice, Config
from rlcore.errors import ConfigError
from rlcore.registry import resolve
from rlcore.registry.known import known_names, settings_of_plugins

GIVEN = ("model.path=m", "data.train=t")
FILE = Path(rlcore.config.other_names.__file__).with_name("other_names.txt")
ROWS = [line.split(" | ") for line in FILE.read_text().splitlines() if not line.startswith("#")]
NAMES = [name for names, _ in ROWS for name in names.split()]


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("learning_rate=1e-5", "Type  optimizer.lr=1e-6"),
        ("optimizer.learning_rate=1e-5", "Type  optimizer.lr=1e-6"),
        ("trainer.batch_size=8", "Type  trainer.prompts_per_step=32  (prompts; each has"),
        ("gradient_accumulation_steps=4", "Type  model.max_tokens_per_device=16384  (micro-batches are divided"),
        ("num_train_epochs=3", "Type  trainer.epochs=1"),
        ("trainer.total_epochs=3", "Type  trainer.epochs=1"),
        ("max_steps=3", "Type  trainer.steps=100"),
        ("num_generations=3", "Type  sampling.samples_per_prompt=8"),
        ("kl_coef=0.1", "Type  algorithm.kl.coefficient=0.01"),
        ("actor_rollout_ref.actor.optim.fused=1", "Type  rlcore migrate SCRIPT"),
        ("actor_rollout_ref.actor.grad_clip=1", "Type  optimizer.clip_grad_norm=1.0"),
    ],
)
def test_a_name_of_another_framework_is_answered_with_the_line_to_type(typed, line):
    with pytest.raises(ConfigError) as caught:
        compose([*GIVEN, typed])

    first, second = str(caught.value).splitlines()
    assert first == f"{typed.partition('=')[0]}: no such setting."
    assert second.startswith(line)


@pytest.mark.parametrize(
    ("section", "chosen", "setting", "lines"),
    [
        ("backend", "local", "cpu_offload", ["It is a setting of  backend=fsdp"]),
        ("rollout", "hf", "lora_rank", ["It is a setting of  rollout=vllm"]),
        ("algorithm", "grpo", "beta", ["Type  algorithm.kl.coefficient=0.01", "It is a setting of  algorithm=gvpo  or  algorithm=online_dpo"]),
        ("algorithm", "grpo", "gamma", ["It is a setting of  algorithm=ppo  or  algorithm=reinforce  or  "]),
    ],
)  # fmt: skip
def test_a_setting_of_another_plugin_is_answered_with_that_plugin(section, chosen, setting, lines):
    with pytest.raises(ConfigError) as caught:
        build_plugin(section, Choice(name=chosen, options={setting: 1}), resolve(section, chosen).object)

    first, *others = str(caught.value).splitlines()
    assert first == f"{section}.{setting}: no such setting."
    assert [found[: len(line)] for found, line in zip(others, lines, strict=True)] == lines


def test_a_misspelled_setting_is_still_answered_with_the_nearest():
    with pytest.raises(
        ConfigError, match=r"trainer.step: no such setting. Did you mean 'steps'\?\nSettings of trainer"
    ):
        compose([*GIVEN, "trainer.step=1"])


@pytest.mark.parametrize("line", [line for _, line in ROWS])
def test_a_line_names_settings_that_exist(line):
    for key in re.findall(r"([a-z_]+(?:\.[a-z_]+)*)=", line):
        section, _, name = key.partition(".")
        if name and section in PLUGIN_SECTIONS:
            assert name.partition(".")[0] in settings_of_plugins(section)
        elif key != "algorithm":
            type_of(Config, key)
    for section, name in re.findall(r"\b(backend|rollout|algorithm)=(\w+)", line):
        assert name in known_names(section) or resolve(section, name)


def test_a_name_has_one_line_and_is_not_a_setting():
    own = {name.rpartition(".")[2] for name in flatten(compose(GIVEN).config)}

    assert len(NAMES) == len(set(NAMES)) > 150
    assert own & set(NAMES) == set()
