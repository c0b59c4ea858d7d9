"""`rlcore new-plugin`: what it writes installs, is listed, passes `rlcore check` and its own tests, and trains."""

import ast
import json
import os
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
from rlcore_workbench.check import KINDS as CHECKED
from rlcore_workbench.new_plugin import KINDS, bounds, main, module_name, write

import rlcore as core
from rlcore.errors import UserError
from rlcore.registry import KINDS as ALL_KINDS
from rlcore.testing.waiting import HANG_S

FILES = {".gitignore", "README.md", "pyproject.toml"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_files_are_written_without_placeholders(tmp_path, kind):
    folder = write(f"my-{kind}", kind, tmp_path)

    files = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
    test = "contract" if kind in CHECKED else kind
    presets = {"src/my_config/conf/preset/my_config.yaml"} if kind == "config" else set()
    assert set(files) == FILES | {f"src/my_{kind}/__init__.py", f"tests/test_{test}.py"} | presets
    assert [name for name, text in files.items() if "$" in text] == []
    for name, text in files.items():
        if name.endswith(".py"):
            ast.parse(text)
    project = tomllib.loads(files["pyproject.toml"])["project"]
    more = ["rlcore-environments"] if kind == "environment" else []  # without it nothing runs an episode
    assert project["dependencies"] == [f"rlcore{bounds(core.__version__)}", *more]
    assert list(project["entry-points"]) == [f"rlcore.{kind}"]
    assert list(project["entry-points"][f"rlcore.{kind}"]) == [f"my_{kind}"]


@pytest.mark.parametrize(
    ("version", "wanted"),
    [("0.1.0", ">=0.1,<0.2"), ("0.12.3", ">=0.12,<0.13"), ("1.4.0", ">=1.4,<2"), ("2.0", ">=2.0,<3")],
)
def test_bounds_end_before_the_next_incompatible_version(version, wanted):
    assert bounds(version) == wanted


@pytest.mark.parametrize(("package", "module"), [("my-reward", "my_reward"), ("a.b-c", "a_b_c"), ("plain", "plain")])
def test_the_module_is_the_package_with_underscores(package, module):
    assert module_name(package) == module


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["my-reward", "--kind", "rewrad"], r"--kind rewrad: no template for this kind\. Did you mean 'reward'\?"),
        (["My-Reward", "--kind", "reward"], "'My-Reward' cannot be the name of a package"),
        (["1st", "--kind", "reward"], "'1st' cannot be the name"),
        (["a/b", "--kind", "reward"], "'a/b' cannot be the name"),
        (["class", "--kind", "reward"], "'class' cannot be the name"),
        (["json", "--kind", "reward"], "a Python module 'json' already exists"),
        (["torch", "--kind", "reward"], "a Python module 'torch' already exists"),
        (["gsm8k", "--kind", "reward"], r"rlcore 0\.[\d.]+ already provides the reward 'gsm8k'"),
        (["there", "--kind", "reward"], "there already exists and is not overwritten"),
        (["fresh", "--kind", "reward", "--dir", "there/file"], "cannot be written: Not a directory"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused_and_nothing_is_written(tmp_path, monkeypatch, arguments, text):
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    Path("there/file").touch()

    with pytest.raises(UserError, match=text):
        main(arguments)

    assert sorted(str(path) for path in Path().rglob("*")) == ["there", "there/file"]


def test_every_kind_of_plugin_has_a_template():
    assert sorted(KINDS) == sorted(ALL_KINDS)


def test_the_next_commands_are_printed(tmp_path, capsys):
    assert main(["my-reward", "--kind", "reward", "--dir", str(tmp_path)]) == 0

    out = capsys.readouterr().out
    assert out.splitlines()[2:] == [
        f"    pip install -e {tmp_path}/my-reward",
        "    rlcore list-plugins --kind reward",
        "    rlcore check reward my_reward",
        "    rlcore train preset=quickstart reward=my_reward",
    ]


# End-to-end tests. A new virtual environment sees the packages of this one; pip installs only into the new one.


def run(*command, cwd=None):
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Directory with a plugin of each kind, installed with `pip install -e` into the virtual environment `venv`."""
    folder = tmp_path_factory.mktemp("walk")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
    python = folder / "venv" / "bin" / "python"
    paths = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    lines = [f"import site; site.addsitedir({path!r})" for path in paths]
    (site / "packages-of-the-tests.pth").write_text("\n".join(lines) + "\n")
    plugins = []
    for kind in KINDS:
        run(sys.executable, "-m", "rlcore", "new-plugin", f"my-{kind}", "--kind", kind, "--dir", folder)
        plugins += ["-e", folder / f"my-{kind}"]
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "install", "--quiet"]
    run(*pip, "--no-index", "--no-deps", "--no-build-isolation", *plugins)
    return folder


def python_of(home):
    return home / "venv" / "bin" / "python"


@pytest.mark.slow
def test_every_kind_is_listed_as_ok(home):
    rows = json.loads(run(python_of(home), "-m", "rlcore", "list-plugins", "--json"))

    found = {(row["kind"], row["name"]): row["status"] for row in rows if row["package"].startswith("my-")}
    assert found == {(kind, f"my_{kind}"): "ok" for kind in KINDS}


@pytest.mark.slow
@pytest.mark.parametrize("kind", CHECKED)
def test_every_kind_passes_the_check(home, kind):
    data = ["--data", "100"] if kind == "dataset" else []
    out = run(python_of(home), "-m", "rlcore", "check", kind, f"my_{kind}", *data, cwd=home)

    first, *_, last = out.splitlines()
    passed, _, total, *_ = last.split()
    assert first.startswith(f"check {kind} my_{kind} (my-{kind} 0.1.0, my_{kind}:")
    assert passed == total


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_passes_its_own_tests(home, kind):
    out = run(python_of(home), "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", cwd=home / f"my-{kind}")

    assert " passed" in out.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "chosen",
    [
        ["reward=my_reward", "algorithm=my_algorithm", "transfer=my_transfer"],
        ["rollout=my_rollout", "backend=my_backend", "trackers=[jsonl,my_tracker]", "plugins.hooks=[my_hooks]"],
    ],
    ids=["reward, algorithm and transfer", "engine, backend, tracker and hooks"],
)
def test_a_run_of_two_steps_uses_them(home, tmp_path, chosen):
    small = ["trainer.steps=2", "trainer.prompts_per_step=8", "eval.max_prompts=8", "runtime=local"]
    place = [f"run.directory={tmp_path}", "run.name=r"]
    os.environ.setdefault("RLCORE_CACHE", str(Path.home() / ".cache" / "rlcore"))

    out = run(python_of(home), "-m", "rlcore", "train", "preset=quickstart", *small, *place, *chosen, cwd=tmp_path)

    lines = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3  # the evaluation before training, and two steps
    if "reward=my_reward" in chosen:
        assert "1 × my_reward" in out
        assert "my_algorithm (my-algorithm 0.1.0)" in out
        best = run(python_of(home), "-m", "rlcore", "my_command", tmp_path / "r", "reward/mean")
        assert best.startswith("reward/mean is highest after step ")
    else:
        assert "my_rollout (my-rollout 0.1.0)" in out
        assert lines[-1]["my_hooks/longest_response"] >= 1
        assert "2,my_hooks/longest_response," in (tmp_path / "r" / "metrics.csv").read_text()
