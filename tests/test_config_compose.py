"""Composition of configs: presets, choices, single settings, precedence, origins, and error messages."""

from __future__ import annotations

import json
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import pytest

import rlcore.registry
from rlcore.config.build import build
from rlcore.config.compose import compose, conf_directories, presets
from rlcore.config.schema import Choice, Config, PluginsConfig, RewardItem
from rlcore.errors import ConfigError, PluginError
from rlcore.registry.catalog import Catalog

GIVEN = ("model.path=m", "data.train=t")
SETTINGS = (
    "preset, model, data, reward, run, sampling, trainer, schedule, eval, checkpoint, recovery, optimizer, critic, runtime, pools, placement,"
    " backend, rollout, algorithm, environment, episode, transfer, device_sharing, trackers, plugins"
)


def install(site: Path, package: str, module: str, files: dict[str, str]) -> None:
    """Install a distribution with metadata, a package that cannot be imported, and YAML files."""
    info = site / f"{package.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[rlcore.config]\n{module} = {module}\n")
    (site / module).mkdir()
    (site / module / "__init__.py").write_text("raise ImportError('a config package is read, never imported')\n")
    for name, text in files.items():
        file = site / module / "conf" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


INSTALLED = frozenset(rlcore.registry.catalog().entries)


@pytest.fixture(autouse=True)
def _the_core_alone(monkeypatch):
    """Hide the installed plugins, because their names and presets would change the messages."""
    scan = Catalog.from_path

    def without(paths=None):
        return Catalog(e for e in scan(paths).entries if e.package == "rlcore" or e not in INSTALLED)

    monkeypatch.setattr(Catalog, "from_path", without)
    rlcore.registry.refresh()
    yield
    monkeypatch.undo()
    rlcore.registry.refresh()


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Install two packages with presets; they share one name with each other and one with rlcore."""
    site = tmp_path / "site packages"
    tiny = "# @package _global_\ndefaults:\n  - /algorithm: fancy\n  - _self_\nmodel: {path: tiny}\n"
    install(site, "rlcore-extra", "extra_rl", {
        "preset/tiny.yaml": tiny,
        "preset/quickstart.yaml": "# @package _global_\nmodel: {path: other}\n",
        "preset/both.yaml": "# @package _global_\nmodel: {path: extra}\n",
        "preset/broken.yaml": "# @package _global_\ndefaults: [/algorithm: nothing]\n",
        "preset/typo.yaml": "# @package _global_\nmodle: {path: x}\n",
        "preset/syntax.yaml": "model: {path\n",
        "algorithm/fancy.yaml": "name: grpo\nclip_high: 0.5\n",
    })  # fmt: skip
    install(site, "rlcore-more", "more_rl", {"preset/both.yaml": "# @package _global_\nmodel: {path: more}\n"})
    monkeypatch.syspath_prepend(site)
    rlcore.registry.refresh()
    yield site
    monkeypatch.undo()
    rlcore.registry.refresh()


@pytest.fixture
def preset(tmp_path):
    """Write a preset that sets a plugin, its options, pools and rewards."""
    file = tmp_path / "mine.yaml"
    file.write_text(
        "model: {path: m}\ndata: {train: t, eval: '${data.train}'}\nsampling: {temperature: 0.7, top_k: 5}\n"
        "algorithm: {name: grpo, clip_high: 0.4, minibatches: 4}\nreward: {items: [gsm8k], timeout_s: 3}\n"
        "pools: {gpu: {devices_per_node: 8}}\nplacement: {default: gpu}\ntrackers: jsonl\nruntime: local\n"
    )
    return file


def test_nothing_but_the_required_gives_the_defaults_of_the_schema():
    assert compose(GIVEN).config == build(Config, {"model": {"path": "m"}, "data": {"train": "t"}})


@pytest.mark.parametrize(
    ("override", "section", "name", "value"),
    [
        pytest.param("sampling.temperature=0.5", "sampling", "temperature", 0.5, id="number"),
        pytest.param("+trainer.steps=7", "trainer", "steps", 7, id="with-plus"),
        pytest.param("++trainer.steps=7", "trainer", "steps", 7, id="with-two"),
        pytest.param("optimizer.lr=1e-5", "optimizer", "lr", 1e-5, id="exponent"),
        pytest.param("data.shuffle=false", "data", "shuffle", False, id="bool"),
        pytest.param("optimizer.betas=[0.8,0.9]", "optimizer", "betas", (0.8, 0.9), id="list"),
        pytest.param("sampling.stop=['a b',\"c\"]", "sampling", "stop", ("a b", "c"), id="list-of-text"),
        pytest.param("run.name=007", "run", "name", "007", id="text-of-digits"),
        pytest.param("run.directory=~/a=b, c (d)", "run", "directory", "~/a=b, c (d)", id="text-as-typed"),
        pytest.param("run.name='a b'", "run", "name", "a b", id="quoted-text"),
        pytest.param("data.eval=a.jsonl,b.jsonl", "data", "eval", "a.jsonl,b.jsonl", id="text-with-comma"),
        pytest.param("data.template=Q: {question}\nA:", "data", "template", "Q: {question}\nA:", id="template"),
        pytest.param("data.eval=${data.train}", "data", "eval", "t", id="interpolation"),
        pytest.param("data.rename={q: question}", "data", "rename", {"q": "question"}, id="mapping"),
        pytest.param("sampling={top_k: 3}", "sampling", "top_k", 3, id="whole-section"),
        pytest.param("critic.optimizer.lr=1", "critic", "optimizer.lr", 1.0, id="two-levels"),
    ],
)
def test_setting_reaches_its_field(override, section, name, value):
    found = getattr(compose([*GIVEN, override]).config, section)
    for part in name.split("."):
        found = getattr(found, part)

    assert found == value


@pytest.mark.parametrize(
    ("override", "section", "value"),
    [
        pytest.param("algorithm=ppo", "algorithm", Choice(name="ppo"), id="registered"),
        pytest.param("algorithm.name=ppo", "algorithm", Choice(name="ppo"), id="dotted"),
        pytest.param("rollout=my.module:Engine", "rollout", Choice(name="my.module:Engine"), id="module"),
        pytest.param("backend=dir/my file.py:B", "backend", Choice(name="dir/my file.py:B"), id="file"),
        pytest.param("rollout=hf@rlcore", "rollout", Choice(name="hf@rlcore"), id="package"),
        pytest.param("+rollout=hf", "rollout", Choice(name="hf"), id="plus"),
        pytest.param(
            "algorithm={name: ppo, epochs: 2}",
            "algorithm",
            Choice(name="ppo", options={"epochs": 2}),
            id="with-options",
        ),
        pytest.param(
            "algorithm.kl.target=2", "algorithm", Choice(name="grpo", options={"kl": {"target": 2}}), id="option"
        ),
        pytest.param("trackers=[jsonl]", "trackers", (Choice(name="jsonl"),), id="list"),
        pytest.param("trackers=jsonl", "trackers", (Choice(name="jsonl"),), id="one"),
        pytest.param("trackers=[]", "trackers", (), id="none"),
        pytest.param("plugins.hooks=[my-hooks]", "plugins", PluginsConfig(hooks=("my-hooks",)), id="hooks"),
        pytest.param("placement={default: main}", "placement", {"default": "main"}, id="literal-placement"),
    ],
)
def test_choice_reaches_its_section(override, section, value):
    found = getattr(compose([*GIVEN, override]).config, section)

    assert found == value


@pytest.mark.parametrize(
    ("override", "items"),
    [
        pytest.param("reward=gsm8k", (RewardItem(name="gsm8k"),), id="name"),
        pytest.param("reward=my_rewards.py:score", (RewardItem(name="my_rewards.py:score"),), id="file"),
        pytest.param("reward=my.rewards:score", (RewardItem(name="my.rewards:score"),), id="module"),
        pytest.param(
            "reward=[gsm8k,{name: length, weight: 0.1, target: 9}]",
            (RewardItem(name="gsm8k"), RewardItem(name="length", weight=0.1, options={"target": 9})),
            id="list",
        ),
        pytest.param(
            "reward={name: length, weight: 2}", (RewardItem(name="length", weight=2.0),), id="one-with-weight"
        ),
    ],
)
def test_reward_choice_sets_the_items_and_leaves_the_rest_to_settings(override, items):
    reward = compose([*GIVEN, override, "reward.timeout_s=5"]).config.reward

    assert (reward.items, reward.timeout_s) == (items, 5.0)


def test_settings_win_over_a_preset_wherever_they_stand(preset):
    for overrides in (
        [f"preset={preset}", "sampling.temperature=0.2"],
        ["sampling.temperature=0.2", f"preset={preset}"],
    ):
        sampling = compose(overrides).config.sampling

        assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.2, 5, 1.0)


def test_preset_takes_short_forms_and_interpolations(preset):
    config = compose([f"preset={preset}"]).config

    assert config.data.eval == "t"
    assert config.trackers == (Choice(name="jsonl"),)
    assert config.runtime.name == "local"
    assert config.reward.items == (RewardItem(name="gsm8k"),)


def test_group_file_wins_over_the_same_plugin_of_a_preset_and_loses_to_settings(preset):
    composed = compose([f"preset={preset}", "algorithm=grpo_clip_higher", "algorithm.minibatches=2"])

    assert composed.config.algorithm.options["clip_high"] == 0.28
    assert composed.config.algorithm.options["minibatches"] == 2
    assert composed.providers["algorithm"] == f"preset={preset}, algorithm=grpo_clip_higher (rlcore), command line"


@pytest.mark.parametrize("override", ["algorithm=ppo", "algorithm.name=ppo"])
def test_another_plugin_drops_the_settings_of_the_one_in_the_preset(preset, override):
    composed = compose([f"preset={preset}", override, "algorithm.epochs=2"])

    assert composed.config.algorithm == Choice(name="ppo", options={"epochs": 2})
    assert composed.providers["algorithm"] == "command line in place of grpo, command line"
    assert compose([*GIVEN, override]).providers["algorithm"] == "command line"


def test_reward_choice_replaces_the_items_of_a_preset_and_keeps_its_other_settings(preset):
    reward = compose([f"preset={preset}", "reward=number"]).config.reward

    assert (reward.items, reward.timeout_s) == ((RewardItem(name="number"),), 3.0)


def test_placement_file_replaces_pools_and_settings_add_to_them(preset):
    pools = compose([f"preset={preset}", "placement=split", "pools.rollout.nodes=2"]).config.pools

    assert {name: (pool.nodes, pool.devices_per_node) for name, pool in pools.items()} == {
        "actor": (1, 1),
        "rollout": (2, 1),
    }


def test_pool_setting_adds_to_the_default_pool():
    assert list(compose([*GIVEN, "pools.other.nodes=2"]).config.pools) == ["main", "other"]


def test_placements_say_where_roles_go():
    assert compose([*GIVEN, "placement=split"]).config.placement == {"default": "actor", "rollout": "rollout"}
    assert compose([*GIVEN, "placement=colocated"]).config.placement == {"default": "main"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        pytest.param(
            "samplin.top_k=1",
            f"samplin.top_k: no such setting. Did you mean 'sampling'?\nSettings: {SETTINGS}.",
            id="section",
        ),
        pytest.param("lr=1", f"lr: no such setting. Did you mean 'optimizer.lr'?\nSettings: {SETTINGS}.", id="short"),
        pytest.param("prest=x", f"prest: no such setting. Did you mean 'preset'?\nSettings: {SETTINGS}.", id="group"),
        pytest.param("hydra.run.dir=x", f"hydra.run.dir: no such setting.\nSettings: {SETTINGS}.", id="hydra"),
        pytest.param(
            "eval.every_step=1",
            "eval.every_step: no such setting. Did you mean 'every_steps'?\nSettings of eval: every_steps, before_training,"
            " max_prompts, by, samples_per_prompt, temperature, top_k, top_p, pass_threshold.",
            id="setting",
        ),
        pytest.param(
            "sampling.temperature=hot",
            "sampling.temperature: expected a number, got 'hot'\nType  sampling.temperature=1.0",
            id="type",
        ),
        pytest.param(
            "sampling.temperature=0.5,1",
            "sampling.temperature=0.5,1: several values for one setting, and one command is one run\n"
            "For a list type  'sampling.temperature=[0.5,1]'   For several runs start the command once for each.",
            id="sweep",
        ),
        pytest.param(
            "reward=gsm8k,number",
            "reward=gsm8k,number: several values for one setting, and one command is one run\n"
            "For a list type  'reward=[gsm8k,number]'   For several runs start the command once for each.",
            id="sweep-of-a-group",
        ),
        pytest.param(
            "optimizer.betas=[0.9",
            "optimizer.betas=[0.9: cannot be read: no viable alternative at input '[0.9'\n"
            "Quote the value:  'optimizer.betas=\"[0.9\"'",
            id="grammar",
        ),
        pytest.param("sampling", "'sampling' is not key=value\nType  sampling=VALUE", id="no-value"),
        pytest.param("~sampling.stop", "'~sampling.stop' is not key=value\nType  sampling.stop=VALUE", id="removal"),
        pytest.param("=3", "'=3' is not key=value\nType  key=VALUE", id="no-key"),
        pytest.param(
            "data.eval=${data.trian}",
            "data.eval: Interpolation key 'data.trian' not found\n"
            "An interpolation names another setting that is given: ${model.path}",
            id="interpolation",
        ),
        pytest.param(
            "preset=quickstrat",
            "no preset named 'quickstrat'. Did you mean 'quickstart'?\n"
            "There are: gsm8k, quickstart.  For one of your own type  preset=path/to/file.yaml",
            id="preset",
        ),
        pytest.param(
            "preset=nowhere/x.yaml",
            "preset=nowhere/x.yaml: there is no file nowhere/x.yaml\nType  preset=NAME; one of: gsm8k, quickstart",
            id="preset-file",
        ),
        pytest.param(
            "placement=splitt",
            "no placement named 'splitt'. Did you mean 'split'?\n"
            "There are: colocated, split.  For one of your own type  placement='{default: POOL}'",
            id="placement",
        ),
        pytest.param(
            "schedule=asynch",
            "no schedule named 'asynch'. Did you mean 'async'?\n"
            "There are: async, pipelined, sync.  For one of your own type  schedule='{steps_ahead: 1, max_staleness: 1}'",
            id="schedule",
        ),
        pytest.param(
            "algorithm=grpo_clip_hihger",
            "no algorithm named 'grpo_clip_hihger'. Did you mean 'grpo_clip_higher'?\nPresets: grpo_clip_higher.  Installed algorithm plugins: grpo, ppo.",
            id="preset-of-a-plugin",
        ),
    ],
)
def test_error_states_the_problem_and_what_to_type(override, message):
    with pytest.raises(ConfigError) as caught:
        compose([*GIVEN, override])

    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["algorithm=ppo", "algorithm.name=grpo"], "algorithm.name", "grpo"),
        (["algorithm={name: ppo, epochs: 2}", "algorithm=grpo"], "algorithm.name", "grpo"),
        (["reward=gsm8k", "reward.items=[length]"], "reward.items", (RewardItem(name="length"),)),
        (["reward.items=[length]", "reward=gsm8k"], "reward.items", (RewardItem(name="gsm8k"),)),
        (["+sampling.top_k=1", "sampling.top_k=2"], "sampling.top_k", 2),
        (["preset=gsm8k", "preset=quickstart"], "preset", None),
        (["data.eval=a", "data.eval="], "data.eval", ""),
    ],
)
def test_of_a_setting_typed_twice_the_last_applies_and_a_line_says_so(overrides, key, value, caplog):
    composed = compose([*GIVEN, *overrides])

    first, second = overrides
    assert [record.message for record in caplog.records] == [
        f"{key} is given twice: '{first}' and '{second}'; the last one applies"
    ]
    assert composed.plain == compose([*GIVEN, second]).plain
    assert composed.overrides == (*GIVEN, second)
    if value is not None:
        assert attrgetter(key)(composed.config) == value


@pytest.mark.parametrize(
    ("overrides", "steps", "epochs"),
    [
        (["trainer.steps=5", "trainer.epochs=2"], 100, 2),
        (["trainer.epochs=2", "trainer.steps=5"], 5, 0),
    ],
)
def test_epochs_and_steps_replace_each_other(overrides, steps, epochs, caplog):
    trainer = compose([*GIVEN, *overrides]).config.trainer

    assert (trainer.steps, trainer.epochs) == (steps, epochs)
    first, second = overrides
    assert f"trainer.steps is given twice: '{first}' and '{second}'; the last one applies" in caplog.text


@pytest.mark.parametrize("zero", ["trainer.epochs=0", ("trainer.epochs", 0)])
def test_zero_epochs_replace_no_steps(zero, caplog):
    for overrides in (["trainer.steps=5", zero], [zero, "trainer.steps=5"]):
        assert compose([*GIVEN, *overrides]).config.trainer.steps == 5
    assert not caplog.text


@pytest.mark.parametrize("given", [["trainer.steps=5"], ["trainer={steps: 5}"]])
def test_steps_replace_the_epochs_of_a_preset_and_epochs_its_steps(tmp_path, given):
    preset = tmp_path / "mine.yaml"
    preset.write_text("trainer: {epochs: 2}\n")

    assert compose([*GIVEN, f"preset={preset}", *given]).config.trainer.epochs == 0
    assert compose([*GIVEN, "preset=quickstart", "trainer.epochs=3"]).config.trainer.epochs == 3
    assert compose([*GIVEN, "trainer.steps=7"], base={"trainer": {"steps": 6, "epochs": 2}}).config.trainer.steps == 7


def test_every_repetition_is_reported_and_the_last_of_three_applies(caplog):
    config = compose([*GIVEN, "trainer.steps=1", "trainer.steps=2", "trainer.steps=3"]).config

    assert config.trainer.steps == 3
    assert len(caplog.records) == 2


def test_a_setting_given_twice_in_python_is_refused():
    with pytest.raises(ConfigError) as caught:
        compose([*GIVEN, ("reward", "gsm8k"), ("reward.items", ["length"])])

    message = "reward.items is given twice: 'reward=gsm8k' and 'reward.items=['length']'\nLeave out one of them."
    assert str(caught.value) == message


@pytest.mark.parametrize("override", ["algorithm=xyz", "reward=nonsense"])
def test_unknown_plugin_raises_the_error_of_the_registry(override):
    kind, _, name = override.partition("=")

    with pytest.raises(PluginError, match=rf"no {kind} named '{name}'"):
        compose([*GIVEN, override])


def test_required_settings_may_be_missing_only_when_inspecting_a_config():
    assert compose([], complete=False).config.model.path == "<required>"
    with pytest.raises(ConfigError, match=r"model\.path is required"):
        compose([])


def test_packages_give_presets_without_being_imported(site):
    composed = compose(["preset=tiny", "data.train=t"])

    assert composed.config.model.path == "tiny"
    assert composed.config.algorithm == Choice(name="grpo", options={"clip_high": 0.5})
    assert composed.providers["model"] == "preset=tiny (rlcore-extra)"
    assert composed.providers["data"] == "command line"
    assert presets("algorithm") == {"grpo_clip_higher": ["rlcore"], "fancy": ["rlcore-extra"]}
    assert list(conf_directories()) == ["rlcore", "rlcore-extra", "rlcore-more"]


@pytest.mark.parametrize(
    ("name", "packages"),
    [("both", ["rlcore-extra", "rlcore-more"]), ("quickstart", ["rlcore", "rlcore-extra"])],
)
def test_preset_of_two_packages_must_be_qualified(site, name, packages):
    with pytest.raises(ConfigError) as caught:
        compose([f"preset={name}"])

    first, second = packages
    assert str(caught.value) == (
        f"preset '{name}' is provided by 2 installed packages: {first}, {second}\n"
        f"Choose one:  preset={name}@{first}  or  preset={name}@{second}"
    )


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("preset=both@rlcore-more", "more"),
        ("preset=both@rlcore-extra", "extra"),
        ("preset=quickstart@rlcore-extra", "other"),
        ("preset=quickstart@rlcore", "quickstart:model"),
    ],
)
def test_qualified_preset_is_the_one_of_that_package(site, override, path):
    assert compose([override], complete=False).config.model.path == path


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", "preset=broken: In 'preset/broken': Could not find 'algorithm/nothing'"),
        ("typo", "preset=typo: no such setting: modle. Did you mean 'model'?"),
        ("syntax", "preset=syntax: while parsing a flow mapping"),
    ],
)
def test_broken_preset_is_named_with_its_file(site, name, message):
    with pytest.raises(ConfigError) as caught:
        compose([f"preset={name}"])

    assert str(caught.value).startswith(message)
    assert f"\nThe file is {site}/extra_rl/conf/preset/{name}.yaml" in str(caught.value)


def test_hidden_package_gives_no_presets(site, monkeypatch):
    monkeypatch.setenv("RLCORE_DISABLE_PLUGINS", "rlcore-extra")
    rlcore.registry.refresh()

    assert list(conf_directories()) == ["rlcore", "rlcore-more"]


def test_composing_leaves_the_process_as_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    compose(["preset=quickstart"])

    assert Path.cwd() == tmp_path
    assert list(tmp_path.iterdir()) == []


def shipped() -> list[str]:
    groups = ("preset", "algorithm", "placement", "schedule")
    return [f"{group}={name}" for group in groups for name, owners in presets(group).items() if "rlcore" in owners]


@pytest.mark.parametrize("choice", shipped())
def test_shipped_file_has_only_settings_that_exist(choice):
    composed = compose([choice], complete=False)

    plugin = rlcore.registry.resolve("algorithm", composed.config.algorithm.name).object
    build(plugin.Config, composed.config.algorithm.options, "algorithm")
    for item in composed.config.reward.items:
        rlcore.registry.resolve("reward", item.name)


def test_shipped_file_never_has_the_name_of_a_plugin():
    """`algorithm=grpo` and the default, which is grpo, would be two things."""
    plugins = {entry.name for entry in rlcore.registry.catalog().of("algorithm")}

    assert plugins.isdisjoint(presets("algorithm"))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    memory_share: float = 0.5


@pytest.fixture
def plugins(monkeypatch):
    """Every plugin is one with the setting `memory_share`."""
    plugin = SimpleNamespace(Config=EngineConfig)
    monkeypatch.setattr(
        rlcore.registry,
        "resolve",
        lambda kind, name: SimpleNamespace(object=plugin, package=f"rlcore-{name}", version="1.0", target="x:y"),
    )


def test_config_command_prints_a_preset_with_the_origin_of_each_section(plugins, capsys, tmp_path):
    from rlcore.cli.config import main

    assert main([*GIVEN, "rollout=my:Engine", "rollout.memory_share=0.25", "placement=split"]) == 0
    printed = capsys.readouterr().out

    lines = printed.splitlines()
    assert "model:                                    # command line" in lines
    assert "optimizer:                                # defaults" in lines
    assert "rollout:                                  # command line; plugin of rlcore-my:Engine 1.0" in lines
    assert "  memory_share: 0.25" in lines
    (tmp_path / "run.yaml").write_text(printed)
    again = compose([f"preset={tmp_path / 'run.yaml'}"]).config
    assert again.rollout == Choice(name="my:Engine", options={"memory_share": 0.25})
    assert list(again.pools) == ["actor", "rollout"]


def test_config_command_marks_missing_required_settings(plugins, capsys, tmp_path):
    from rlcore.cli.config import main

    main([])
    printed = capsys.readouterr().out

    assert "  path: ???" in printed
    (tmp_path / "run.yaml").write_text(printed)
    with pytest.raises(ConfigError, match=r"model\.path is required"):
        compose([f"preset={tmp_path / 'run.yaml'}"])


def test_config_command_prints_json(plugins, capsys):
    from rlcore.cli.config import main

    main(["--json", "model.path=m", "sampling.top_k=3"])
    content = json.loads(capsys.readouterr().out)

    assert list(content) == ["config", "providers", "overrides"]
    assert content["config"]["sampling"]["top_k"] == 3
    assert content["config"]["data"]["train"] == "???"
    assert content["config"]["trackers"] == [
        {"name": "console", "memory_share": 0.5},
        {"name": "jsonl", "memory_share": 0.5},
    ]
    assert content["providers"]["sampling"] == "command line"
    assert content["overrides"] == ["model.path=m", "sampling.top_k=3"]


def test_config_command_refuses_a_setting_that_the_plugin_lacks(plugins):
    from rlcore.cli.config import main

    with pytest.raises(ConfigError, match=r"rollout\.memory: no such setting\. Did you mean 'memory_share'\?"):
        main([*GIVEN, "rollout.memory=1"])


def test_help_of_the_config_command_has_an_example(capsys):
    from rlcore.cli.config import main

    with pytest.raises(SystemExit) as caught:
        main(["-h"])

    assert caught.value.code == 0
    assert "rlcore config preset=quickstart algorithm=ppo" in capsys.readouterr().out


def test_optional_hooks_are_used_if_they_are_installed(tmp_path, monkeypatch):
    typed = [*GIVEN, "plugins.hooks=[saved?, mine]"]

    absent = compose(typed).config
    info = tmp_path / "saved-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: saved\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rlcore.hooks]\nsaved = s:H\n")
    monkeypatch.syspath_prepend(tmp_path)
    rlcore.registry.refresh()
    present = compose(typed).config
    monkeypatch.setenv("RLCORE_DISABLE_PLUGINS", "saved")
    rlcore.registry.refresh()

    assert absent.plugins.hooks == ("mine",)
    assert present.plugins.hooks == ("saved", "mine")
    assert compose(typed).config == absent


def test_the_quickstart_is_recorded_only_if_rlcore_report_is_installed(monkeypatch):
    alone = compose(["preset=quickstart"]).config
    monkeypatch.undo()
    rlcore.registry.refresh()
    pytest.importorskip("rlcore_report", reason="needs plugins/rlcore-report")
    together = compose(["preset=quickstart"]).config

    assert (alone.plugins.hooks, together.plugins.hooks) == ((), ("report",))
