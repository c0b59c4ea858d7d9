"""The extras of the core: one line installs a working set of its plugins."""

import json
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from rlcore import __version__
from tests.distributions import PIP, add_third_party, build_wheels, call, make_environment

ROOT = Path(__file__).parents[1]
PLUGINS = sorted(ROOT.glob("plugins/rlcore-*"))
SHARED = {"algorithms", "environments", "fsdp", "report", "rewards", "trackers", "workbench"}
EXTRAS = {"vllm": {"vllm"}, "sglang": {"sglang"}, "fsdp": {"fsdp"}, "megatron": {"megatron"}, "all": SHARED}
NEEDED = {"vllm": {"vllm"}, "sglang": {"sglang"}, "fsdp": {"peft"}, "megatron": {"megatron-core"}, "all": {"pyarrow"}}
"""Extra -> a package of others that it must install too."""


def test_every_plugin_of_this_repository_is_in_an_extra():
    assert set.union(*EXTRAS.values()) == {path.name.removeprefix("rlcore-") for path in PLUGINS}


def test_the_extras_allow_the_version_of_the_core():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [Requirement(line) for name in EXTRAS for line in extras[name]]

    plugins = [it for it in named if it.name.startswith("rlcore-")]
    assert len(plugins) == len(PLUGINS)
    assert [str(it) for it in plugins if __version__ not in it.specifier] == []


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """Folder with the wheels of the core and of all plugins, and empty ones of the packages that they need."""
    home = tmp_path_factory.mktemp("index")
    lowest: dict[str, Version] = {}
    for wheel in build_wheels([ROOT, *PLUGINS], home):
        for needed in requirements(wheel):
            name = canonicalize_name(needed.name)
            bounds = [Version(it.version) for it in needed.specifier if it.operator == ">="]
            lowest[name] = max([lowest.get(name, Version("0")), *bounds])
    for name, version in lowest.items():
        if not name.startswith("rlcore"):
            write_wheel(home / "wheels", name, version)
    return home / "wheels"


def requirements(wheel):
    """Return the requirements of a wheel, those of its extras included."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = Parser().parsestr(archive.read(metadata).decode()).get_all("Requires-Dist")
    return [Requirement(line) for line in lines]


def write_wheel(folder, name, version):
    """Write a wheel without modules."""
    stem = f"{name.replace('-', '_')}-{version}"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{stem}.dist-info/RECORD", "")


@pytest.mark.slow
@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_installs_its_plugins_in_an_empty_environment(extra, index, tmp_path):
    python = make_environment(tmp_path)

    call(*PIP, "--python", python, "install", "--no-index", "--find-links", index, f"rlcore[{extra}]")

    (site,) = tmp_path.glob("venv/lib/*/site-packages")
    assert NEEDED[extra] <= {path.name.partition("-")[0].replace("_", "-") for path in site.glob("*.dist-info")}
    add_third_party(tmp_path)
    rows = json.loads(call(python, "-m", "rlcore", "list-plugins", "--json", cwd=tmp_path))
    assert {row["package"] for row in rows} == {"rlcore", *(f"rlcore-{name}" for name in EXTRAS[extra])}
    assert {row["status"] for row in rows} == {"ok"}
