"""The guides for plugin authors: snippets are files that run, commands exist, and the reference matches the code."""

import importlib.util
import re
import shlex
import sys
from pathlib import Path

import pytest

from rlcore.algorithms.grpo import GRPOConfig
from rlcore.cli import COMMANDS
from rlcore.config.build import build, flatten
from rlcore.config.compose import PLUGIN_SECTIONS, compose
from rlcore.config.schema import Config
from rlcore.data.columns import STANDARD_COLUMNS
from rlcore.errors import RlcoreError
from rlcore.hooks import specs
from rlcore.registry.known import known_names
from rlcore.testing import AlgorithmContract, EnvironmentContract, RewardContract, RolloutContract

pytest.importorskip("rlcore_workbench", reason="needs plugins/rlcore-workbench: make test-plugins installs it")

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.glob("writing-*.md")), DOCS / "python.md", DOCS / "data.md"]
BLOCK = re.compile(r"(?:<!-- (file|part): (\S+) -->\n)?```(\w*)\n(.*?)```", re.DOTALL)


def load(path):
    spec = importlib.util.spec_from_file_location(f"docs_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def blocks(language):
    found = [(page.name, *block) for page in PAGES for block in BLOCK.findall(page.read_text())]
    return [(page, how, path, text) for page, how, path, kind, text in found if kind == language]


def commands():
    """Return every line `rlcore …` of the pages, as words without the trailing comment."""
    lines = [(page, line) for page, _, _, text in blocks("") for line in text.splitlines()]
    return [(page, shlex.split(line, comments=True)) for page, line in lines if line.startswith("rlcore ")]


@pytest.mark.parametrize(("page", "how", "path", "text"), blocks("python"))
def test_every_snippet_is_a_file_or_part_of_a_file(page, how, path, text):
    assert how, f"a snippet of {page} names no file: {text[:60]}"
    if how == "file":
        assert (ROOT / path).read_text() == text
    else:
        assert text in (ROOT / path).read_text()


def test_every_snippet_file_is_part_of_a_page():
    shown = {path for _, how, path, _ in blocks("python") if how == "file"}

    assert shown == {f"docs/snippets/{file.name}" for file in (DOCS / "snippets").glob("*.py")}


@pytest.mark.parametrize("page", [*sorted(DOCS.glob("*.md")), ROOT / "README.md"], ids=lambda page: page.name)
def test_targets_of_relative_links_exist(page):
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())

    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def test_every_command_exists():
    names = {words[1] for _, words in commands()}

    assert len(commands()) > 15
    assert names <= {*COMMANDS, *known_names("command")}


@pytest.mark.parametrize(("page", "words"), [one for one in commands() if one[1][1] == "train"])
def test_the_settings_of_every_train_command_compose(page, words):
    mine = ("my_reward", "my_algorithm", "my_engine", "my_backend", "my_environment")  # made by new-plugin
    settings = [word for word in words[2:] if not word.endswith(mine)]

    composed = compose(settings, complete=False)

    for item in (*composed.config.reward.items, composed.config.algorithm, composed.config.environment):
        if ".py:" in item.name:
            assert (ROOT / item.name.partition(":")[0]).is_file()


class TestRightAndShort(RewardContract):
    target = f"{DOCS}/snippets/reward_function.py:right_and_short"
    options = {"limit": 4}  # noqa: RUF012
    examples = (
        ({"completion": "so 42", "answer": "42", "num_tokens": 4}, 1.0),
        ({"completion": "so 42", "answer": "42", "num_tokens": 5}, 0.5),
        ({"completion": "so 43", "answer": "42", "num_tokens": 4}, 0.0),
    )


class TestPolite(RewardContract):
    target = f"{DOCS}/snippets/reward_class.py:Polite"

    @property
    def examples(self):
        return load(DOCS / "snippets" / "reward_class.py").EXAMPLES["Polite"]


class TestSmoothGRPO(AlgorithmContract):
    minibatches = 1

    def make(self):
        cls = load(DOCS / "snippets" / "algorithm_loss.py").SmoothGRPO
        return cls(GRPOConfig(minibatches=self.minibatches))


class TestSmoothGRPOOffPolicy(TestSmoothGRPO):
    minibatches = 3


class TestDice(RolloutContract):
    """Without the tests of features that the page lists as missing."""

    test_a_stop_token_ends_a_response_and_stays_in_it = None
    test_a_stop_string_ends_a_response_and_stays_in_it = None
    test_an_incomplete_update_is_refused_and_never_used = None

    def make(self, model, context):
        cls = load(DOCS / "snippets" / "engine.py").Dice
        return cls(cls.Config(), model=model, context=context)


class TestGuess(EnvironmentContract):
    module, name = "environment", "Guess"

    @property
    def examples(self):
        return load(DOCS / "snippets" / f"{self.module}.py").EXAMPLES

    def make(self):
        return getattr(load(DOCS / "snippets" / f"{self.module}.py"), self.name)(None)


class TestDictionary(TestGuess):
    module, name = "tools", "Dictionary"


def test_the_page_lists_the_missing_features_of_the_smallest_engine():
    text = (DOCS / "writing-an-engine.md").read_text()

    assert "it accepts any weights, does not end at stop tokens, and its log-probs are not those of the model" in text


def test_the_complete_algorithm_has_under_a_hundred_lines():
    source = ROOT / "examples" / "algorithm-plugin" / "src" / "example_dpo" / "__init__.py"

    assert len(source.read_text().splitlines()) < 100


def test_the_index_of_known_plugins_is_current():
    make = load(DOCS / "make_known.py")

    assert make.TARGET.read_text() == make.known(), "type  python docs/make_known.py"
    settings = make.TARGET.with_name("known_settings.json").read_text()
    assert settings == make.known_settings(), "type  python docs/make_known.py"


def test_the_index_refuses_two_packages_with_one_name(tmp_path):
    for package in ("one", "two"):
        (tmp_path / package).mkdir()
        points = f'[project]\nname = "rlcore-{package}"\n[project.entry-points."rlcore.reward"]\nsame = "m:f"\n'
        (tmp_path / package / "pyproject.toml").write_text(points)

    with pytest.raises(ValueError, match=r"reward 'same' belongs to rlcore-one\nRename"):
        load(DOCS / "make_known.py").known(tmp_path)


def test_the_reference_matches_the_code():
    make = load(DOCS / "make_reference.py")

    assert (DOCS / "reference.md").read_text() == make.reference(), "type  python docs/make_reference.py"


def test_every_setting_has_a_meaning():
    make = load(DOCS / "make_reference.py")

    assert [setting for setting, _, meaning in make.settings() if not meaning.split(") ", 1)[-1].strip()] == []


def test_the_list_of_contract_tests_and_mutants_matches_the_code():
    make = load(DOCS / "make_reference.py")

    assert make.CONTRACTS.read_text() == make.contracts(), "type  python docs/make_reference.py"


def test_the_reference_names_every_setting_hook_column_and_error():
    text = (DOCS / "reference.md").read_text()
    config = build(Config, {"model": {"path": "p"}, "data": {"train": "t"}})
    settings = {
        re.sub(r"\.name$", "", name) if name.split(".")[0] in PLUGIN_SECTIONS else name for name in flatten(config)
    }
    named = {re.sub(r"^pools\.main", "pools.NAME", name) for name in settings}
    columns = {column.name for column in STANDARD_COLUMNS}
    hooks = {f"{name}(" for name in vars(specs) if name.startswith("rlcore_")}
    errors, found = [RlcoreError], set()
    while errors:
        cls = errors.pop()
        errors += [
            below for below in cls.__subclasses__() if below.__module__ in ("rlcore.errors", "rlcore.registry.errors")
        ]
        found.add(f"{cls.__module__}.{cls.__name__}")

    missing = [name for name in {*named, *columns, *found} if f"`{name}`" not in text]
    assert missing + [name for name in hooks if f"`{name}" not in text] == []
