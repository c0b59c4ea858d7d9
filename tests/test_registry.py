"""The catalog, `resolve` on the controller and `load` on a worker, with distributions in a temporary folder."""

from __future__ import annotations

import itertools
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from rlcore import __version__
from rlcore.protocols.optional import OPTIONAL
from rlcore.registry import Catalog, Entry, PluginSpec, catalog, load, misspellings, refresh, resolve
from rlcore.registry.catalog import DISABLE, IGNORE_VERSIONS, is_compatible
from rlcore.registry.errors import (
    DuplicatePlugin,
    IncompatiblePlugin,
    PluginImportError,
    PluginNotFound,
    PluginProtocolError,
)
from rlcore.testing.waiting import HANG_S
from tests.distributions import REWARD, environment, plant, write_module


def read(*sites: Path) -> Catalog:
    """Return the catalog of these folders only."""
    return Catalog.from_path([str(site) for site in sites])


def reward(site: Path, package: str, name: str = "length", **options) -> Path:
    module = package.replace("-", "_")
    return plant(site, package, {"reward": {name: f"{module}:score"}}, code={module: REWARD}, **options)


def test_a_plugin_whose_import_fails_is_listed_without_being_imported(site):
    plant(site, "bomb", {"reward": {"boom": "bomb:score"}}, version="2.1", code={"bomb": "raise RuntimeError('boom')"})

    entries = read(site).entries

    assert entries == (Entry("reward", "boom", "bomb", "2.1", "bomb:score", ">=0.1"),)
    assert "bomb" not in sys.modules


def test_entries_are_sorted_by_kind_then_name_then_package(tmp_path):
    reward(tmp_path, "zeta", "b")
    reward(tmp_path, "alpha", "b")
    reward(tmp_path, "mid", "a")
    plant(tmp_path, "last", {"algorithm": {"z": "last:A"}, "config": {"last": "last"}})

    shown = [(entry.kind, entry.name, entry.package) for entry in read(tmp_path).entries]

    assert shown == [
        ("algorithm", "z", "last"),
        ("config", "last", "last"),
        ("reward", "a", "mid"),
        ("reward", "b", "alpha"),
        ("reward", "b", "zeta"),
    ]


def test_of_two_versions_of_one_package_the_first_on_the_path_counts_as_for_imports(tmp_path):
    new, old = tmp_path / "new", tmp_path / "old"
    reward(new, "my-reward", version="2.0")
    reward(old, "My_Reward", version="1.0")

    assert [entry.version for entry in read(new, old).entries] == ["2.0"]
    assert [entry.version for entry in read(old, new).entries] == ["1.0"]


def test_a_newer_version_without_plugins_hides_the_plugins_of_an_older_one_behind_it(tmp_path):
    new, old = tmp_path / "new", tmp_path / "old"
    plant(new, "shrunk", {}, version="2.0")
    reward(old, "shrunk", version="1.0")

    assert read(new, old).entries == ()


@pytest.mark.parametrize(
    "folder",
    ["my_reward-1.0.dist-info", "my-reward-1.0.dist-info", "My.Reward-1.0-py3.11.egg-info", "my_reward.egg-info"],
)
def test_the_package_name_is_normalized_whatever_the_folder_is_called(tmp_path, folder):
    info = tmp_path / folder
    info.mkdir()
    (info / ("METADATA" if folder.endswith("dist-info") else "PKG-INFO")).write_text("Name: My.Reward\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rlcore.reward]\nlength = a:b\n")

    assert [entry.package for entry in read(tmp_path).entries] == ["my-reward"]


@pytest.mark.parametrize(
    ("metadata", "points"),
    [
        pytest.param(None, b"[rlcore.reward]\nx = a:b\n", id="no_metadata_file"),
        pytest.param(b"Name: torn\n", b"[rlcore.reward]\nx = a:b\n", id="no_version"),
        pytest.param(b"Name: torn\nVersion: 1\n", b"[rlcore.reward]\njunk\n", id="line_without_equals"),
        pytest.param(b"Name: torn\nVersion: 1\n", b"\xff\xfe[rlcore.reward]\nx=a:b\n", id="points_not_utf8"),
        pytest.param(b"Name: \xff\xfe\nVersion: 1\n", b"[rlcore.reward]\nx = a:b\n", id="metadata_not_utf8"),
        pytest.param(
            b"Name: torn\nVersion: 1\nRequires-Dist: rlcore>=banana\n",
            b"[rlcore.reward]\nx=a:b\n",
            id="bad_requirement",
        ),
    ],
)
def test_torn_metadata_costs_only_its_own_package_and_a_warning_names_it(tmp_path, metadata, points):
    info = tmp_path / "torn-1.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_bytes(points)
    if metadata is not None:
        (info / "METADATA").write_bytes(metadata)
    reward(tmp_path, "whole")

    with pytest.warns(UserWarning, match=r"(?s)torn-1\.dist-info cannot be read .* Reinstall the package"):
        plugins = read(tmp_path)

    assert [entry.package for entry in plugins.entries] == ["whole"]


def test_the_metadata_of_a_package_without_plugins_is_not_even_read(tmp_path):
    other = tmp_path / "other-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_bytes(b"\xff\xfe")
    (other / "entry_points.txt").write_text("[console_scripts]\nother = other:main\n")

    assert read(tmp_path).entries == ()


@pytest.mark.parametrize(
    ("requires", "expected"),
    [
        pytest.param(["rlcore<0.3,>=0.2"], ">=0.2,<0.3", id="lower_bound_first"),
        pytest.param(["rlcore (>=0.2)"], ">=0.2", id="old_parentheses"),
        pytest.param(["RLCore~=0.1"], "~=0.1", id="other_case"),
        pytest.param(["rlcore[math]>=0.1"], ">=0.1", id="with_an_extra"),
        pytest.param(["rlcore>=0.1", "rlcore<1"], ">=0.1,<1", id="two_lines"),
        pytest.param(["rlcore"], "", id="no_bound"),
        pytest.param(["rlcore @ https://example.org/rlcore.tar.gz"], "", id="by_address"),
        pytest.param(["rlcore-fsdp>=9"], "", id="another_package"),
        pytest.param(["rlcore>=9; extra == 'dev'", "rlcore>=0.1"], ">=0.1", id="an_extra_of_the_plugin_does_not_count"),
        pytest.param(["rlcore>=9; python_version < '3'", "rlcore>=0.1"], ">=0.1", id="a_marker_that_is_false"),
    ],
)
def test_the_bound_on_rlcore_is_read_from_the_requirements_that_hold_here(tmp_path, requires, expected):
    reward(tmp_path, "bounded", requires=["numpy", *requires])

    assert [entry.requires for entry in read(tmp_path).entries] == [expected]


@pytest.mark.parametrize(
    ("requires", "core", "fits"),
    [
        (">=0.2,<0.3", "0.2.5", True),
        (">=0.2,<0.3", "0.3.0", False),
        (">=0.2,<0.3", "0.2.0.dev1", False),
        (">=0.2", "0.3.0.dev1", True),
        ("", "7.0", True),
    ],
)
def test_compatibility_is_the_packages_own_bound_and_development_versions_count(requires, core, fits):
    assert is_compatible(Entry("reward", "x", "p", "1.0", "p:x", requires), core) is fits


def test_the_catalog_of_the_process_is_read_once_until_it_is_refreshed(site):
    assert catalog() is catalog()
    reward(site, "late-reward", "late")
    assert catalog().find("reward", "late") == []

    assert [entry.package for entry in refresh().find("reward", "late")] == ["late-reward"]
    assert catalog().find("reward", "late") != []
    (site / "late_reward-1.0.dist-info" / "entry_points.txt").unlink()
    assert refresh().find("reward", "late") == []


def test_every_built_in_resolves_and_meets_its_protocol():
    failures = {}
    for entry in catalog().entries:
        if entry.package == "rlcore" and entry.kind != "config":
            try:
                resolve(entry.kind, f"{entry.name}@rlcore")
            except Exception as error:
                failures[entry.kind, entry.name] = error
    assert failures == {}


def test_a_name_resolves_to_the_object_and_to_plain_data_about_it(site):
    reward(site, "my-reward", version="1.2")

    resolved = resolve("reward", "length", catalog=read(site))

    assert resolved.object("four") == 4.0
    assert resolved.spec == PluginSpec("reward", "length", "my-reward", "1.2", "my_reward:score")
    assert pickle.loads(pickle.dumps(resolved.spec)) == resolved.spec


def test_only_the_plugin_that_is_asked_for_is_imported(site):
    reward(site, "wanted", "wanted")
    plant(site, "bomb", {"reward": {"boom": "bomb:score"}}, code={"bomb": "raise SystemExit(3)"})

    assert resolve("reward", "wanted", catalog=read(site)).object("ab") == 2.0
    assert "bomb" not in sys.modules


@pytest.mark.parametrize("package", ["my-reward", "my_reward", "My.Reward"])
def test_a_package_qualifies_a_name_in_any_spelling(site, package):
    reward(site, "my-reward")
    reward(site, "other-reward")

    assert resolve("reward", f"length@{package}", catalog=read(site)).package == "my-reward"


def test_project_code_resolves_by_module_and_attribute(site):
    write_module(site, "mine.rewards", "class Box:\n    @staticmethod\n    def half(completion):\n        return 0.5\n")

    resolved = resolve("reward", "mine.rewards:Box.half")

    assert resolved.object("x") == 0.5
    assert (resolved.name, resolved.package, resolved.target) == ("Box.half", "", "mine.rewards:Box.half")


def test_project_code_resolves_by_file_and_its_functions_pickle(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my file.py").write_text(REWARD)

    resolved = resolve("reward", "my file.py:score")

    assert resolved.target == f"{tmp_path}/my file.py:score", "absolute, so that a worker elsewhere finds it"
    assert pickle.loads(pickle.dumps(resolved.object)) is resolved.object
    assert resolve("reward", f"{tmp_path}/my file.py:score").object is resolved.object, "the file ran once"


def test_two_files_of_one_name_stay_apart(tmp_path):
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "r.py").write_text(f"def score(completion):\n    return {number}.0\n")

    scores = [resolve("reward", f"{tmp_path}/{number}/r.py:score").object("") for number in (1, 2)]

    assert scores == [1.0, 2.0]


def test_a_file_that_failed_is_imported_again_after_a_fix(tmp_path):
    file = tmp_path / "r.py"
    file.write_text("1 / 0")
    with pytest.raises(PluginImportError, match="ZeroDivisionError"):
        resolve("reward", f"{file}:score")

    file.write_text("# mended, and of another length\n" + REWARD)

    assert resolve("reward", f"{file}:score").object("abc") == 3.0


def test_a_class_resolves_to_itself_and_is_checked_as_well():
    from rlcore.trackers.jsonl import JSONLTracker

    resolved = resolve("tracker", JSONLTracker)

    assert resolved.object is JSONLTracker
    assert resolved.target == "rlcore.trackers.jsonl:JSONLTracker"
    with pytest.raises(PluginProtocolError, match="tracker 'int' does not meet the Tracker protocol: no method start"):
        resolve("tracker", int)


@pytest.mark.parametrize(
    ("ref", "error", "words"),
    [
        ("no_such_module_at_all:f", PluginNotFound, "there is no module 'no_such_module_at_all' on the path"),
        ("mine:scoer", PluginNotFound, "no 'scoer' in it. Did you mean 'score'?\nIt defines: score."),
        ("mine:", PluginNotFound, "no '' in it"),
        ("MINE.py:score", PluginNotFound, "there is no file"),
        ("mien.py:score", PluginNotFound, "Did you mean"),
        ("needy:f", PluginImportError, "needs the Python package 'absent_dependency'"),
        ("torn:f", PluginImportError, "failed to import: SyntaxError"),
        ("rude:f", PluginImportError, "failed to import: SystemExit: 7"),
        ("nameless:f", PluginImportError, "failed to import: ModuleNotFoundError: by hand"),
        ("mine:NUMBER", PluginProtocolError, "it is a int, which cannot be called"),
    ],
)
def test_each_way_in_which_project_code_can_be_wrong_has_its_text(site, monkeypatch, ref, error, words):
    monkeypatch.chdir(site)
    write_module(site, "mine", REWARD + "NUMBER = 3\n")
    write_module(site, "needy", "import absent_dependency.part")
    write_module(site, "torn", "def f(:")
    write_module(site, "rude", "raise SystemExit(7)")
    write_module(site, "nameless", "raise ModuleNotFoundError('by hand')")

    with pytest.raises(error) as caught:
        resolve("reward", ref)

    assert words in str(caught.value)


def test_a_failing_lazy_attribute_is_reported_as_a_failed_import(site):
    write_module(site, "lazy", "def __getattr__(name):\n    import absent_dependency\n")

    with pytest.raises(PluginImportError, match="needs the Python package 'absent_dependency'"):
        resolve("reward", "lazy:score")


@pytest.mark.parametrize(
    ("extras", "advice"),
    [
        pytest.param(["absent-dependency>=2; extra == 'full'"], "pip install 'needy\\[full\\]'", id="in_an_extra"),
        pytest.param(
            ['absent_dependency; extra == "full" and python_version > "3"'], "'needy\\[full\\]'", id="two_conditions"
        ),
        pytest.param(["absent-dependency-tools; extra == 'full'"], "pip install absent_dependency$", id="longer_name"),
        pytest.param(["absent-dependency"], "pip install absent_dependency$", id="not_in_an_extra"),
    ],
)
def test_a_missing_dependency_is_looked_up_in_the_extras(site, extras, advice):
    code = {"needy": "import absent_dependency"}
    plant(site, "needy", {"reward": {"needy": "needy:f"}}, requires=extras, code=code)

    with pytest.raises(PluginImportError, match=advice):
        resolve("reward", "needy", catalog=read(site))


def test_a_catalog_made_by_hand_needs_no_installed_package(site):
    write_module(site, "needy", "import absent_dependency")
    plugins = Catalog([Entry("reward", "needy", "not-on-this-disk", "1.0", "needy:f", "")])

    with pytest.raises(PluginImportError, match="pip install absent_dependency"):
        resolve("reward", "needy", catalog=plugins)


def test_a_hooks_entry_point_may_name_a_module_and_a_reward_may_not(site):
    plant(site, "eyes", {"hooks": {"eyes": "eyes"}, "reward": {"eyes": "eyes"}}, code={"eyes": "X = 1"})

    assert resolve("hooks", "eyes", catalog=read(site)).object.X == 1
    with pytest.raises(PluginImportError, match="registers reward 'eyes' as eyes, but there is no ':' with a name"):
        resolve("reward", "eyes", catalog=read(site))


@pytest.mark.parametrize("order", list(itertools.permutations(["alpha", "mid", "zeta"])))
def test_two_providers_of_a_name_are_an_error_when_it_is_used_whatever_the_path_order(site, order):
    sites = [reward(site / package, package, "sums" if package != "mid" else "other") for package in order]
    plugins = read(*sites)

    with pytest.raises(DuplicatePlugin) as caught:
        resolve("reward", "sums", catalog=plugins)

    text = str(caught.value)
    assert text.index("alpha 1.0") < text.index("zeta 1.0")
    assert "reward=sums@alpha" in text
    assert _entry_of(plugins, "other") == "mid"


def _entry_of(plugins: Catalog, name: str) -> str:
    return plugins.find("reward", name)[0].package


def test_one_name_of_two_kinds_is_no_duplicate(site):
    code = {"both": REWARD + "class Eyes: ...\n"}
    plant(site, "both", {"reward": {"x": "both:score"}, "hooks": {"x": "both:Eyes"}}, code=code)

    assert resolve("reward", "x", catalog=read(site)).object("abc") == 3.0


def test_hiding_one_of_two_providers_settles_it(site, monkeypatch):
    reward(site, "one-reward")
    reward(site, "two-reward")
    monkeypatch.setenv(DISABLE, "two-reward")

    assert resolve("reward", "length", catalog=read(site)).package == "one-reward"


def test_hash_seed_and_path_order_change_nothing(tmp_path):
    sites = [reward(tmp_path / package, package, "gsm8k") for package in ("omega", "alpha", "mid")]
    program = (
        "from rlcore.registry import catalog, resolve\n"
        "print(*[e for e in catalog().entries if e.package != 'rlcore'], sep='\\n')\n"
        "try: resolve('reward', 'gsm8k')\n"
        "except Exception as error: print(error)\n"
    )
    outputs = set()
    for seed, order in zip((0, 1, 2, 77), itertools.permutations(sites)):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=environment(*order, PYTHONHASHSEED=str(seed)),
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=True,
        )
        outputs.add(done.stdout)

    assert len(outputs) == 1
    text = outputs.pop()
    assert "reward 'gsm8k' is provided by 4 installed packages" in text, "the fourth is the core's own"
    assert "or hide one:  export RLCORE_DISABLE_PLUGINS=omega" in text


@pytest.mark.parametrize("word", ["length", "my-reward", "My_Reward"])
def test_a_plugin_is_hidden_by_its_own_name_or_by_its_package(site, monkeypatch, word):
    reward(site, "my-reward")
    monkeypatch.setenv(DISABLE, f" {word} ,")
    plugins = read(site)

    assert plugins.hidden(plugins.entries[0]) == word
    with pytest.raises(PluginNotFound, match=f"is installed .* but hidden by {DISABLE}={word}"):
        resolve("reward", "length", catalog=plugins)
    with pytest.raises(PluginNotFound) as caught:
        resolve("reward", "xyz", catalog=plugins)
    assert "Installed reward plugins: none." in str(caught.value)


def test_a_hidden_word_that_matches_nothing_is_a_warning(site, monkeypatch):
    reward(site, "my-reward")
    monkeypatch.setenv(DISABLE, "lenght,my-reward")
    plugins = read(site)

    with pytest.warns(UserWarning, match=f"{DISABLE} names 'lenght', which is not an installed plugin or package"):
        assert plugins.hidden(plugins.entries[0]) == "my-reward"


def test_an_incompatible_plugin_is_refused_before_its_import_and_can_be_tried_anyway(site, monkeypatch):
    code = {"future": "print('imported')\n" + REWARD}
    plant(site, "my-future", {"reward": {"far": "future:score"}}, requires=["rlcore>=99"], code=code)

    with pytest.raises(IncompatiblePlugin, match=rf"written for rlcore>=99, and rlcore {__version__} is installed"):
        resolve("reward", "far", catalog=read(site))
    assert "future" not in sys.modules

    monkeypatch.setenv(IGNORE_VERSIONS, "My_Future")
    assert resolve("reward", "far", catalog=read(site)).object("ab") == 2.0


def test_a_worker_imports_the_target_and_looks_for_nothing(site):
    reward(site, "my-reward")
    spec = resolve("reward", "length", catalog=read(site)).spec
    (site / "my_reward-1.0.dist-info" / "entry_points.txt").unlink()

    assert load(spec)("four") == 4.0


@pytest.mark.parametrize(("installed", "told"), [("2.0", "my-reward 2.0"), (None, "my-reward nothing")])
def test_a_worker_with_another_version_refuses_before_the_import(site, installed, told):
    if installed:
        plant(site, "my-reward", {}, version=installed, code={"my_reward": "raise AssertionError"})

    with pytest.raises(IncompatiblePlugin, match=f"rank 3 on gpu-07 has {told}; the driver has 1.0"):
        load(PluginSpec("reward", "length", "my-reward", "1.0", "my_reward:score"), rank=3, host="gpu-07")


def test_a_worker_loads_project_code_without_a_version(tmp_path):
    (tmp_path / "mine.py").write_text(REWARD)
    spec = resolve("reward", f"{tmp_path}/mine.py:score").spec

    assert load(spec)("abc") == 3.0


class Complete:
    """Tracker with all required methods."""

    def start(self, config, *, resume_step): ...
    def log(self, step, metrics): ...
    def log_samples(self, step, samples): ...
    def finish(self, summary): ...


@pytest.mark.parametrize(
    ("change", "miss"),
    [
        pytest.param({}, None, id="complete"),
        pytest.param({"log": lambda self, *anything: None}, None, id="takes_everything"),
        pytest.param({"log": lambda self, number, values: None}, None, id="other_names_for_positions"),
        pytest.param({"log": lambda self, step, metrics, flush=True: None}, None, id="more_with_a_default"),
        pytest.param({"log": staticmethod(lambda step, metrics: None)}, None, id="static"),
        pytest.param({"log": classmethod(lambda cls, step, metrics: None)}, None, id="on_the_class"),
        pytest.param({"log": None}, "no method log", id="absent"),
        pytest.param({"log": property(lambda self: None)}, "no method log", id="property"),
        pytest.param({"log": lambda self, step: None}, "log() lacks 'metrics'", id="position_lacks"),
        pytest.param({"log": staticmethod(lambda step: None)}, "log() lacks 'metrics'", id="static_lacks"),
        pytest.param({"start": lambda self, config: None}, "start() lacks 'resume_step'", id="keyword_lacks"),
        pytest.param(
            {"log": lambda self, step, metrics, color: None},
            "log() requires 'color', which rlcore does not pass",
            id="asks_more",
        ),
        pytest.param(
            {"log": lambda self, step, metrics, *, color: None},
            "log() requires 'color', which rlcore does not pass",
            id="keyword",
        ),
    ],
)
def test_methods_and_parameters_are_compared_with_the_protocol(change, miss):
    plugin = type("Mine", (Complete,), change)

    if miss is None:
        assert resolve("tracker", plugin).object is plugin
        return
    with pytest.raises(PluginProtocolError) as caught:
        resolve("tracker", plugin)
    assert f"does not meet the Tracker protocol: {miss}.\n" in str(caught.value)


def test_all_misses_are_reported_together():
    plugin = type("Mine", (Complete,), {"log": None, "finish": lambda self: None})

    with pytest.raises(PluginProtocolError, match=r"no method log; finish\(\) lacks 'summary'\."):
        resolve("tracker", plugin)


def test_an_instance_where_a_class_is_wanted_is_named_as_such(site):
    plant(site, "made", {"tracker": {"made": "made:IT"}}, code={"made": "IT = 5"})

    with pytest.raises(PluginProtocolError, match="it is a int, not a class"):
        resolve("tracker", "made", catalog=read(site))


@pytest.mark.parametrize(
    ("kind", "member", "meant"),
    [
        ("backend", "free_device", "frees_device"),
        ("rollout", "engine_byte", "engine_bytes"),
        ("algorithm", "witout", "without"),
        ("algorithm", "compare_samples", "compares_samples"),
        ("environment", "tool", "tools"),
    ],
)
def test_a_member_that_is_nearly_an_optional_one_is_reported(kind, member, meant):
    assert misspellings(kind, type("Mine", (), {member: ()})) == [f"'{member}' has no effect; did you mean '{meant}'?"]
    assert misspellings(kind, type("Mine", (), {member: (), meant: ()})) == []


@pytest.mark.parametrize("kind", sorted(OPTIONAL))
def test_no_built_in_plugin_has_a_misspelled_member(kind):
    for entry in catalog().entries:
        if entry.kind == kind and entry.package == "rlcore":
            assert misspellings(kind, resolve(kind, f"{entry.name}@rlcore").object) == []
