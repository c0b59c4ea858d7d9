"""The strict builder of configs: accepted values, error messages, and conversion back to plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from rlcore.config.build import build, build_plugin, flatten, to_plain, type_of
from rlcore.config.schema import Choice, Config, RewardItem
from rlcore.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    size: int = 2
    ratio: float = 0.5

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"size: expected at least 1, got {self.size}\nType  size=1")
        if self.ratio == 13:
            raise ValueError("thirteen is not a ratio")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    path: str
    count: int = 1
    on: bool = True
    level: Literal["low", "high"] = "low"
    limit: int | None = None
    either: int | str = 1
    pair: tuple[float, float] = (0.9, 0.5)
    words: tuple[str, ...] = ()
    numbers: list[int] = field(default_factory=list)
    inners: Mapping[str, Inner] = field(default_factory=dict)
    inner: Inner = Inner()
    free: Any = None
    plugin: Choice = field(default_factory=lambda: Choice(name="a"))
    rewards: tuple[RewardItem, ...] = ()


@pytest.mark.parametrize(
    ("key", "given", "built"),
    [
        pytest.param("count", 3, 3, id="int"),
        pytest.param("on", False, False, id="bool"),
        pytest.param("level", "high", "high", id="literal"),
        pytest.param("limit", None, None, id="optional-none"),
        pytest.param("limit", 4, 4, id="optional-int"),
        pytest.param("either", "x", "x", id="union"),
        pytest.param("pair", [1, 2], (1.0, 2.0), id="fixed-tuple-of-float-from-int"),
        pytest.param("words", ["a", "b"], ("a", "b"), id="tuple"),
        pytest.param("numbers", [1, 2], [1, 2], id="list"),
        pytest.param("inners", {"x": {"size": 3}}, {"x": Inner(size=3)}, id="mapping-of-sections"),
        pytest.param("inner", {"ratio": 1}, Inner(ratio=1.0), id="section"),
        pytest.param("free", {"any": [1]}, {"any": [1]}, id="any"),
        pytest.param("plugin", "grpo", Choice(name="grpo"), id="choice-by-name"),
        pytest.param(
            "plugin", {"name": "grpo", "n": 2}, Choice(name="grpo", options={"n": 2}), id="choice-with-options"
        ),
        pytest.param(
            "rewards",
            ["math", {"name": "length", "weight": 1, "target": 9, "options": {"unit": "t"}}],
            (RewardItem(name="math"), RewardItem(name="length", weight=1.0, options={"unit": "t", "target": 9})),
            id="rewards",
        ),
    ],
)
def test_value_is_built(key, given, built):
    assert getattr(build(Outer, {"path": "p", key: given}), key) == built


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(
            {"path": "p", "cuont": 1},
            "cuont: no such setting. Did you mean 'count'?\nSettings: path, count, on, level, limit, either, pair, words,"
            " numbers, inners, inner, free, plugin, rewards.",
            id="unknown-key",
        ),
        pytest.param(
            {"path": "p", "inner": {"sise": 1}},
            "inner.sise: no such setting. Did you mean 'size'?\nSettings of inner: size, ratio.",
            id="unknown-key-below",
        ),
        pytest.param({}, "path is required\nType  path=text", id="missing"),
        pytest.param({"path": "???"}, "path is required\nType  path=text", id="left-open-in-yaml"),
        pytest.param({"path": 3}, "path: expected text, got 3\nType  path=text", id="int-for-text"),
        pytest.param({"path": None}, "path: expected text, got nothing (null)\nType  path=text", id="null"),
        pytest.param({"path": "p", "count": 1.5}, "count: expected a whole number, got 1.5\nType  count=1", id="float"),
        pytest.param(
            {"path": "p", "count": True}, "count: expected a whole number, got True\nType  count=1", id="bool"
        ),
        pytest.param({"path": "p", "on": 1}, "on: expected true or false, got 1\nType  on=true", id="int-for-bool"),
        pytest.param(
            {"path": "p", "inner": {"ratio": "hot"}},
            "inner.ratio: expected a number, got 'hot'\nType  inner.ratio=0.5",
            id="text-for-number",
        ),
        pytest.param(
            {"path": "p", "level": "hihg"},
            "level: expected one of low, high; got 'hihg'. Did you mean 'high'?\nType  level=low",
            id="literal",
        ),
        pytest.param(
            {"path": "p", "either": 1.5},
            "either: expected a whole number or text, got 1.5\nType  either=1",
            id="union",
        ),
        pytest.param({"path": "p", "words": "a"}, "words: expected a list, got 'a'\nType  words=[a,b]", id="list"),
        pytest.param({"path": "p", "pair": [1]}, "pair: expected 2 values, got [1]\nType  pair=[0.9,0.5]", id="length"),
        pytest.param(
            {"path": "p", "pair": [1, "x"]}, "pair[1]: expected a number, got 'x'\nType  pair=[0.5,…]", id="item"
        ),
        pytest.param(
            {"path": "p", "inners": 3},
            "inners: expected a mapping {name: value}, got 3\nType  inners='{name: value}'",
            id="mapping",
        ),
        pytest.param(
            {"path": "p", "inners": {"x": {"size": "a"}}},
            "inners.x.size: expected a whole number, got 'a'\nType  inners.x.size=2",
            id="in-mapping",
        ),
        pytest.param(
            {"path": "p", "inner": 3},
            "inner: expected a section with settings, got 3\nType  inner.size=…",
            id="section",
        ),
        pytest.param(
            {"path": "p", "inner": {"size": 0}},
            "inner.size: expected at least 1, got 0\nType  inner.size=1",
            id="own-check-of-a-section",
        ),
        pytest.param({"path": "p", "inner": {"ratio": 13}}, "inner: thirteen is not a ratio", id="own-value-error"),
        pytest.param(
            {"path": "p", "plugin": {"n": 1}},
            "plugin: expected a name, or a section with a name; got {'n': 1}\nType  plugin=NAME",
            id="choice-without-name",
        ),
        pytest.param(
            {"path": "p", "rewards": [{"name": "l", "a": 1, "options": {"a": 2}}]},
            "rewards[0].a: given twice, also under options\nLeave out one of them.",
            id="option-twice",
        ),
    ],
)
def test_error_states_the_problem_and_what_to_type(data, message):
    with pytest.raises(ConfigError) as caught:
        build(Outer, data)

    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "model.path is required\nType  model.path=DIR   a directory in Hugging Face layout; for a first run"),
        (
            {"model": {"path": "m"}},
            "data.train is required\nType  data.train=train.jsonl   JSONL, CSV, Parquet or Arrow;",
        ),
    ],
    ids=["model", "data"],
)
def test_missing_required_settings_state_what_to_type(data, message):
    with pytest.raises(ConfigError) as caught:
        build(Config, data)

    assert str(caught.value).startswith(message)


def test_unsupported_type_of_a_setting_is_a_type_error():
    @dataclass(frozen=True)
    class Odd:
        value: complex = 1j

    with pytest.raises(TypeError, match="setting 'value' is declared as <class 'complex'>"):
        build(Odd, {"value": 1})


def full_config() -> Config:
    plain = {
        "model": {"path": "m"},
        "data": {"train": "t", "rename": {"q": "question"}},
        "sampling": {"stop": ["\n"], "temperature": 1},
        "optimizer": {"betas": [0.9, 0.95]},
        "pools": {"main": {"devices_per_node": 2}},
        "algorithm": {"name": "ppo", "epochs": 2, "kl": {"coefficient": 0.1}},
        "trackers": ["console", {"name": "wandb", "project": "x"}],
        "reward": {"items": ["math", {"name": "length", "weight": 0.5, "target": 3}]},
    }
    return build(Config, plain)


def test_plain_form_builds_the_same_config():
    config = full_config()

    plain = to_plain(config)

    assert build(Config, plain) == config
    assert plain["algorithm"] == {"name": "ppo", "epochs": 2, "kl": {"coefficient": 0.1}}
    assert plain["sampling"]["stop"] == ["\n"]


def test_flat_form_has_dotted_names_and_unsplit_lists():
    flat = flatten(full_config())

    assert flat["sampling.temperature"] == 1.0
    assert flat["algorithm.kl.coefficient"] == 0.1
    assert flat["pools.main.devices_per_node"] == 2
    assert flat["placement"] == {}
    assert flat["trackers"] == [{"name": "console"}, {"name": "wandb", "project": "x"}]


def test_core_has_fewer_than_150_settings():
    assert 50 < len(flatten(full_config())) < 150


class WithSettings:
    Config = Inner


class WithoutSettings:
    pass


def test_settings_of_a_plugin_are_built_from_its_section():
    assert build_plugin("rollout", Choice(name="x", options={"size": 4}), WithSettings) == Inner(size=4)
    assert build_plugin("rollout", Choice(name="x"), WithoutSettings) is None


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (WithSettings, "rollout.speed: no such setting.\nSettings of rollout: size, ratio."),
        (WithoutSettings, "rollout.speed: 'x' has no settings\nLeave out  rollout.speed"),
    ],
    ids=["with-settings", "without"],
)
def test_unknown_setting_of_a_plugin_is_refused(plugin, message):
    with pytest.raises(ConfigError) as caught:
        build_plugin("rollout", Choice(name="x", options={"speed": 4}), plugin)

    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("sampling.temperature", float),
        ("algorithm.name", str),
        ("algorithm.kl.target", Any),
        ("pools.any.python", str),
        ("placement.actor", str),
        ("algorithm", Choice),
    ],
)
def test_type_of_a_dotted_setting(path, kind):
    assert type_of(Config, path) is kind


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("sampling.temprature", "sampling.temprature: no such setting. Did you mean 'temperature'?"),
        ("pools.main.node", "pools.main.node: no such setting. Did you mean 'nodes'?"),
        ("sampling.top_k.x", "sampling.top_k.x: 'sampling.top_k' is one value\nType  sampling.top_k=8"),
        ("reward.items.0", "reward.items.0: 'reward.items' is one value\nType  reward.items=[a,b]"),
    ],
)
def test_setting_that_does_not_exist_has_no_type(path, message):
    with pytest.raises(ConfigError) as caught:
        type_of(Config, path)

    assert str(caught.value).startswith(message)
