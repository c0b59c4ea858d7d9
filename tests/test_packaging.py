"""The wheel: its contents, its use without the source tree, and the startup time of its commands."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import re
import resource
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from rlcore.testing.waiting import HANG_S
from tests.distributions import environment
from tests.test_layers import LIGHT, imports

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HEAVY = ("torch", "ray", "hydra", "omegaconf", "transformers", "numpy", "tensordict", "rich")


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    """Build the wheel from a copy, so that no build folder is left in the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("rlcore", "tests"):
        shutil.copytree(ROOT / name, folder / "source" / name, ignore=ignored)
    for name in ("pyproject.toml", "LICENSE", PROJECT["readme"]):
        shutil.copy(ROOT / name, folder / "source")
    pip("wheel", "--no-index", "--no-deps", "--no-build-isolation", "-w", str(folder), str(folder / "source"))
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def contents(wheel) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="session")
def installed(wheel, tmp_path_factory) -> Path:
    """Folder with the core and no other package."""
    target = tmp_path_factory.mktemp("installed")
    pip("install", "--no-index", "--no-deps", "--target", str(target), str(wheel))
    return target


@pytest.fixture(scope="session")
def readers(tmp_path_factory) -> Path:
    """Folder with only the packages for reading metadata, which light commands may load."""
    folder = tmp_path_factory.mktemp("readers")
    for name in LIGHT:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            origin = Path(spec.origin)
            source = origin.parent if origin.name == "__init__.py" else origin
            (folder / source.name).symlink_to(source)
    return folder


def alone(installed: Path, readers: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python without site-packages, so that any other import fails."""
    env = environment() | {"PYTHONPATH": f"{installed}:{readers}"}
    return subprocess.run(
        [sys.executable, "-S", *arguments],
        env=env,
        cwd=installed,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def metadata(contents: dict[str, bytes], name: str) -> str:
    (path,) = (path for path in contents if path.endswith(f".dist-info/{name}"))
    return contents[path].decode()


def test_the_wheel_holds_the_package_with_its_data_and_no_tests(contents):
    wanted = {
        str(path.relative_to(ROOT))
        for pattern in ("*.py", "*.yaml", "*.json", "*.txt", "py.typed")
        for path in (ROOT / "rlcore").rglob(pattern)
    }
    found = {name for name in contents if ".dist-info/" not in name}

    assert found == wanted
    assert "rlcore/config/conf/preset/quickstart.yaml" in found
    assert "rlcore/py.typed" in found, "authors of plugins check their types against the core's"
    assert [name for name in contents if re.search(r"(^|/)(tests?|conftest\.py|test_\w+\.py)(/|$)", name)] == []


def test_the_wheel_is_pure_and_has_the_version_of_the_package(wheel):
    from rlcore import __version__

    assert wheel.name == f"rlcore-{__version__}-py3-none-any.whl"


def test_the_entry_points_are_those_of_the_project(contents):
    import configparser

    found = configparser.ConfigParser(delimiters="=")
    found.optionxform = str  # type: ignore[assignment]
    found.read_string(metadata(contents, "entry_points.txt"))

    wanted = {"console_scripts": PROJECT["scripts"], **PROJECT["entry-points"]}
    assert {group: dict(found[group]) for group in found.sections()} == wanted


def test_every_entry_point_has_its_module_in_the_wheel(contents):
    targets = {target for group in PROJECT["entry-points"].values() for target in group.values()}
    modules = [target.partition(":")[0].replace(".", "/") for target in targets]

    assert [it for it in modules if not {f"{it}.py", f"{it}/__init__.py"} & set(contents)] == []


_SDIST = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"


@pytest.mark.parametrize(
    "project", [ROOT, *sorted(ROOT.glob("plugins/rlcore-*"))], ids=lambda path: path.name if path != ROOT else "rlcore"
)
def test_wheels_from_tree_and_from_sdist_contain_the_license(project, tmp_path):
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "plugins", "examples", "benchmarks", "outputs")
    shutil.copytree(project, source, ignore=ignored)
    subprocess.run([sys.executable, "-c", _SDIST, str(tmp_path)], cwd=source, timeout=HANG_S, check=True)
    (sdist,) = tmp_path.glob("*.tar.gz")
    for kind, origin in (("tree", source), ("sdist", sdist)):
        pip("wheel", "--no-index", "--no-deps", "--no-build-isolation", "-w", str(tmp_path / kind), str(origin))
        (built,) = (tmp_path / kind).glob("*.whl")
        with zipfile.ZipFile(built) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/licenses/LICENSE"))
            assert archive.read(name) == (ROOT / "LICENSE").read_bytes()


def test_license_is_the_unmodified_apache_license():
    digest = hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest()

    assert digest == "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30", (
        "apache.org/licenses/LICENSE-2.0.txt"
    )


BROUGHT = {
    "huggingface_hub": "transformers",
    "hydra": "hydra-core",
    "tokenizers": "transformers",
    "yaml": "omegaconf",
}
"""Module -> the requirement that installs it, where the names differ."""
OF_OTHERS = {"pytest"}
"""Packages that only `rlcore.testing` needs."""


def test_what_is_imported_is_declared_and_what_is_declared_is_imported(contents):
    required = Parser().parsestr(metadata(contents, "METADATA")).get_all("Requires-Dist")
    always = {re.match(r"[\w-]+", line)[0] for line in required if "extra ==" not in line}
    extras = {re.match(r"[\w-]+", line)[0] for line in required if "extra ==" in line}
    modules = {
        name.partition(".")[0]
        for path in (ROOT / "rlcore").rglob("*.py")
        for name in imports(ast.parse(path.read_text()))
    } - {"rlcore", "__future__", *sys.stdlib_module_names}
    packages = {BROUGHT.get(name, name.replace("_", "-")) for name in modules - OF_OTHERS}

    assert packages - extras == always
    assert packages <= always | extras


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["list-plugins"], ["train", "--help"]], ids=" ".join)
def test_a_light_command_runs_where_only_the_wheel_and_readers_of_metadata_are(installed, readers, arguments):
    program = (
        "import sys; from rlcore.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as end: assert not end.code\n"
        "print('\\nloaded', *{name.partition('.')[0] for name in sys.modules})"
    )
    done = alone(installed, readers, "-c", program, *arguments)

    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.rpartition("\nloaded")[2].split())
    assert loaded - {*sys.stdlib_module_names, "__main__", "rlcore"} <= LIGHT
    assert not loaded & set(HEAVY)


def test_the_installed_command_lists_every_plugin_of_the_wheel(installed, readers):
    done = alone(installed, readers, str(installed / "bin" / "rlcore"), "list-plugins", "--json")

    rows = {(row["kind"], row["name"]): row for row in json.loads(done.stdout)}
    wanted = {
        (group.removeprefix("rlcore."), name) for group, named in PROJECT["entry-points"].items() for name in named
    }
    assert done.returncode == 0
    assert {key for key, row in rows.items() if row["package"] == "rlcore"} == wanted
    assert {row["status"] for row in rows.values()} == {"ok"}


def test_the_installed_command_says_its_version(installed, readers):
    done = alone(installed, readers, str(installed / "bin" / "rlcore"), "--version")

    from rlcore import __version__

    assert done.stdout == f"rlcore {__version__}\n"


def test_presets_are_found_in_the_installed_wheel(installed, tmp_path):
    program = (
        "import rlcore; from rlcore.config.compose import presets; print(rlcore.__file__); print(*presets('preset'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(installed),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=True,
    )

    assert done.stdout.split() == [str(installed / "rlcore" / "__init__.py"), "gsm8k", "quickstart"]


def cpu_seconds(installed: Path, *arguments: str) -> float:
    """Return the shortest CPU time of five runs of a child process."""
    spent = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, *arguments],
            env=environment(installed),
            cwd=installed,
            stdout=subprocess.DEVNULL,
            timeout=HANG_S,
            check=True,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(spent)


# An empty program takes about 20 ms; `import torch` alone is 100 times as much.
@pytest.mark.parametrize(("arguments", "budget"), [(["--version"], 4), (["--help"], 4), (["list-plugins"], 20)])
def test_a_light_command_costs_a_few_starts_of_python(installed, arguments, budget):
    bare = cpu_seconds(installed, "-c", "pass")

    assert cpu_seconds(installed, "-m", "rlcore", *arguments) < budget * bare


@pytest.fixture(scope="session", params=["vllm", "sglang"])
def engine(request, tmp_path_factory) -> tuple[str, Path]:
    """Return the name of an engine, and a folder with its plugin, installed without the engine."""
    name, folder = request.param, tmp_path_factory.mktemp("engine")
    if importlib.util.find_spec(name):
        pytest.skip(f"{name} is installed here")
    plugin = ROOT / "plugins" / f"rlcore-{name}"
    shutil.copytree(
        plugin / "src", folder / "source" / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__")
    )
    for file in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(plugin / file, folder / "source")
    pip("wheel", "--no-index", "--no-deps", "--no-build-isolation", "-w", str(folder), str(folder / "source"))
    (built,) = folder.glob("*.whl")
    pip("install", "--no-index", "--no-deps", "--target", str(folder / "installed"), str(built))
    return name, folder / "installed"


def test_the_wheel_of_an_engine_is_listed_beside_that_of_the_core(installed, readers, engine):
    name, plugin = engine
    done = alone(installed, readers, "-c", _WITH.format(str(plugin)), "list-plugins", "--json")

    (row,) = [row for row in json.loads(done.stdout) if row["name"] == name]
    # SGLang may be in another environment than the plugin, vLLM may not.
    status = {"vllm": "incomplete", "sglang": "ok"}[name]
    assert (row["kind"], row["package"], row["status"]) == ("rollout", f"rlcore-{name}", status)
    assert re.fullmatch(r"pip install .*vllm[<>=].*" if name == "vllm" else "", row["detail"])


_WITH = "import sys; sys.path.append({!r}); from rlcore.cli import main; main(sys.argv[1:])"


def test_a_run_without_the_engine_says_what_is_missing_and_what_to_type(engine, tmp_path):
    name, plugin = engine
    settings = ["preset=quickstart", f"rollout={name}", "runtime=local", f"run.directory={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-m", "rlcore", "train", *settings],
        env=environment(plugin),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )

    assert done.returncode == 2
    assert re.search(
        rf'rollout={name} needs \w+, which is not installed in .*\nType  .*pip install "{name}', done.stderr
    )
