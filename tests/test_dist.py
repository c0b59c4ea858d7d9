"""The distributions: one version, types for users, and the same bytes from the same commit."""

import importlib.util
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

import rlcore
from rlcore.testing.waiting import HANG_S

ROOT = Path(__file__).parents[1]
PLUGINS = sorted((ROOT / "plugins").glob("rlcore-*"))


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda path: path.name)
def test_a_plugin_has_the_version_of_the_core_and_ships_its_types(plugin):
    about = tomllib.loads((plugin / "pyproject.toml").read_text())
    module = plugin.name.replace("-", "_")
    major, minor, _ = rlcore.__version__.split(".")

    assert about["project"]["version"] == rlcore.__version__
    assert f"rlcore>={major}.{minor},<{major}.{int(minor) + 1}" in about["project"]["dependencies"]
    assert (plugin / "src" / module / "py.typed").is_file()
    assert "py.typed" in about["tool"]["setuptools"]["package-data"][module]
    assert (plugin / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_the_citation_names_this_version():
    assert f"\nversion: {rlcore.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_every_dependency_is_in_the_table_of_licenses():
    spec = importlib.util.spec_from_file_location("licenses", ROOT / "tools" / "licenses.py")
    licenses = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(licenses)

    page = (ROOT / "docs" / "licenses.md").read_text()

    assert [name for name in licenses.dependencies() if f"| `{name}` |" not in page] == []


def test_two_builds_of_a_commit_are_equal(tmp_path):
    if subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, check=False).returncode:
        pytest.skip("not a git checkout")
    command = [sys.executable, str(ROOT / "tools" / "dist.py")]
    for name, umask in (("one", 0o022), ("other", 0o077)):
        done = subprocess.run(
            [*command, str(tmp_path / name), "plugins/rlcore-rewards"],
            umask=umask,
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr

    one, other = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "other"))
    assert sorted(name.rpartition(".")[2] for name in one) == ["gz", "whl"]
    assert one == other
    with tarfile.open(next((tmp_path / "one").glob("*.tar.gz"))) as archive:
        assert {(it.uid, it.uname, it.mtime) for it in archive} == {(0, "", archive.getmembers()[0].mtime)}
