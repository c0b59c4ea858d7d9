"""The texts of plugin errors, each from a real situation and compared word for word with tests/golden/plugin_error_*.txt.

A is a typo; B a known package that is not installed; C both; D a name like no other; E a missing dependency; F another
rlcore; G two providers; H a failing import; I a packaging mistake; J a protocol; K another version on a worker; L hidden.
"""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path

import pytest

from rlcore.errors import PluginError, UserError
from rlcore.registry import Catalog, Entry, PluginSpec, load, resolve
from rlcore.registry import errors as plugin_errors
from tests.distributions import REWARD, plant

GOLDEN = Path(__file__).parent / "golden"
ROLLOUT = """\
class VLLMRollout:
    def generate(self, requests): ...
    def load_weights(self, weights, version): ...
    def sleep(self): ...
    def wake(self): ...
    def close(self): ...
"""


@pytest.fixture
def site(site, monkeypatch):
    """Return the folder of the fixture `site`, with rlcore 0.3.0 installed."""
    monkeypatch.setattr("rlcore.version.__version__", "0.3.0")
    monkeypatch.delenv("RLCORE_DISABLE_PLUGINS", raising=False)
    return site


def vllm(site: Path, code: str = ROLLOUT, *, requires=("rlcore>=0.3", "vllm_engine>=0.9; extra == 'vllm'")) -> None:
    points = {"rollout": {"vllm": "rlcore_vllm.rollout:VLLMRollout"}}
    plant(site, "rlcore-vllm", points, version="0.3.1", requires=requires, code={"rlcore_vllm.rollout": code})


def fake(site: Path) -> None:
    plant(site, "rlcore-fake", {"rollout": {"fake": "fake_p:Fake"}})


def ask(site: Path, kind: str, ref: str) -> None:
    resolve(kind, ref, catalog=Catalog.from_path([str(site)]))


def typo(site, monkeypatch):
    fake(site)
    vllm(site)
    ask(site, "rollout", "vlm")


def known_but_absent(site, monkeypatch):
    fake(site)
    ask(site, "rollout", "sglang")


def typo_of_a_known_one(site, monkeypatch):
    fake(site)
    ask(site, "rollout", "sglng")


def like_no_other(site, monkeypatch):
    fake(site)
    vllm(site)
    ask(site, "rollout", "xyz")


def missing_dependency(site, monkeypatch):
    vllm(site, "import vllm_engine.core")
    ask(site, "rollout", "vllm")


def other_core(site, monkeypatch):
    points = {"backend": {"fsdp": "rlcore_fsdp:FSDP"}}
    plant(site, "rlcore-fsdp", points, version="0.2.4", requires=["rlcore<0.3,>=0.2"])
    ask(site, "backend", "fsdp")


def two_providers(site, monkeypatch):
    plant(site, "other-reward", {"reward": {"math": "or_p:R"}}, version="2.0")
    plant(site, "math-reward", {"reward": {"math": "mr_p:R"}})
    ask(site, "reward", "math")


def failing_import(site, monkeypatch):
    error = "libcudart.so.12: cannot open shared object file"
    vllm(site, f"raise OSError({error!r})")
    ask(site, "rollout", "vllm")


def packaging_mistake(site, monkeypatch):
    plant(site, "ghost", {"algorithm": {"ghost": "ghost_p.mod:A"}}, version="0.1")
    ask(site, "algorithm", "ghost")


def protocol(site, monkeypatch):
    vllm(site, ROLLOUT.replace("    def load_weights(self, weights, version): ...\n", "").replace(", requests", ""))
    ask(site, "rollout", "vllm")


def other_version_on_a_worker(site, monkeypatch):
    plant(site, "rlcore-vllm", {}, version="0.2.4")
    spec = PluginSpec("rollout", "vllm", "rlcore-vllm", "0.3.1", "rlcore_vllm.rollout:VLLMRollout")
    load(spec, rank=3, host="gpu-07")


def hidden(site, monkeypatch):
    monkeypatch.setenv("RLCORE_DISABLE_PLUGINS", "rlcore-fake,rlcore-vllm")
    fake(site)
    vllm(site)
    ask(site, "rollout", "vllm")


def project_module_absent(site, monkeypatch):
    ask(site, "reward", "my_rewards:score")


def project_file_absent(site, monkeypatch):
    (site / "rewards.py").write_text(REWARD)
    ask(site, "reward", f"{site}/reward.py:score")


def project_attribute_absent(site, monkeypatch):
    (site / "rewards.py").write_text(REWARD)
    ask(site, "reward", f"{site}/rewards.py:scores")


def project_file_fails(site, monkeypatch):
    (site / "rewards.py").write_text("1 / 0\n")
    ask(site, "reward", f"{site}/rewards.py:score")


def project_file_imports_its_neighbor(site, monkeypatch):
    (site / "own").mkdir()
    (site / "own" / "helpers.py").touch()
    (site / "own" / "rewards.py").write_text("import helpers\n")
    ask(site, "reward", f"{site}/own/rewards.py:score")


def wrong_package(site, monkeypatch):
    plant(site, "math-reward", {"reward": {"math": "mr_p:R"}})
    ask(site, "reward", "math@maths-reward")


def hook_like_no_other(site, monkeypatch):
    ask(site, "hooks", "xyz")


CASES = {
    "A": (typo, plugin_errors.PluginNotFound),
    "B": (known_but_absent, plugin_errors.PluginNotFound),
    "C": (typo_of_a_known_one, plugin_errors.PluginNotFound),
    "D": (like_no_other, plugin_errors.PluginNotFound),
    "E": (missing_dependency, ImportError),
    "F": (other_core, RuntimeError),
    "G": (two_providers, plugin_errors.DuplicatePlugin),
    "H": (failing_import, ImportError),
    "I": (packaging_mistake, ImportError),
    "J": (protocol, TypeError),
    "K": (other_version_on_a_worker, RuntimeError),
    "L": (hidden, plugin_errors.PluginNotFound),
    "project_module_absent": (project_module_absent, LookupError),
    "project_file_absent": (project_file_absent, LookupError),
    "project_attribute_absent": (project_attribute_absent, LookupError),
    "project_file_fails": (project_file_fails, ImportError),
    "project_file_imports_its_neighbor": (project_file_imports_its_neighbor, ImportError),
    "wrong_package": (wrong_package, LookupError),
    "hook_like_no_other": (hook_like_no_other, LookupError),
}


@pytest.mark.parametrize("letter", CASES)
def test_the_text_is_the_golden_one_and_crosses_processes(site, monkeypatch, letter):
    situation, expected_class = CASES[letter]
    with pytest.raises(expected_class) as caught:
        situation(site, monkeypatch)

    assert isinstance(caught.value, (PluginError, UserError))
    text = str(caught.value).replace(str(site), "DIR") + "\n"
    golden = GOLDEN / f"plugin_error_{letter}.txt"
    if os.environ.get("RLCORE_UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (type(copy), str(copy)) == (type(caught.value), str(caught.value))


@pytest.mark.parametrize("letter", CASES)
def test_each_text_names_the_plugin_first_and_then_something_to_type(letter):
    first, *rest = (GOLDEN / f"plugin_error_{letter}.txt").read_text().splitlines()

    assert re.search(r"'[\w:/.]+'|rlcore-\w+|ghost", first)
    to_type = (
        r"pip install|rlcore (doctor|list-plugins)|python |(un|ex)(set|port) |\w+(\.\w+)?=|@\w+|Did you mean|It defines"
    )
    assert re.search(to_type, "\n".join([first, *rest])), "a reader is left without a next step"


def test_the_golden_files_are_those_of_the_cases():
    assert sorted(file.stem for file in GOLDEN.glob("plugin_error_*")) == sorted(f"plugin_error_{it}" for it in CASES)


@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        ("rollout", "rollout.name=x"),
        ("reward", "reward=x"),
        ("tracker", "trackers=[x]"),
        ("hooks", "plugins.hooks=[x]"),
        ("dataset", "data.dataset=x"),
        ("transfer", "transfer=x"),
        ("command", "rlcore x"),
        ("worker", "RoleSpec(worker='x')"),
    ],
)
def test_what_to_type_is_the_setting_that_chooses_this_kind(kind, shown):
    assert plugin_errors.option(kind, "x") == shown


@pytest.mark.parametrize(
    "kind", ["rollout", "backend", "algorithm", "reward", "tracker", "hooks", "dataset", "transfer"]
)
def test_the_setting_that_an_error_proposes_is_one_that_the_config_takes(kind):
    from rlcore.config.compose import compose

    setting = plugin_errors.option(kind, "pack.mod:It")

    config = compose([setting], complete=False).config

    assert "pack.mod:It" in repr(config)


def test_a_stranger_with_the_name_of_a_built_in_plugin_leaves_the_built_in_to_choose():
    entries = [Entry("algorithm", "grpo", package, "1.0", "m:A", "") for package in ("evil-dup", "rlcore")]

    *_, choice = str(plugin_errors.duplicate("algorithm", "grpo", entries)).splitlines()

    assert choice == (
        "Choose one:  algorithm.name=grpo@evil-dup  or  algorithm.name=grpo@rlcore"
        "      or hide one:  export RLCORE_DISABLE_PLUGINS=evil-dup"
    )
