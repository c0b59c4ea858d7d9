"""`pools.NAME.python`: checks of an interpreter before anything starts."""

import json
import os
import stat
import sys

import pytest

from rlcore.controller.interpreter import check_interpreter
from rlcore.controller.pool import PoolConfig, RuntimeConfig
from rlcore.controller.runtime import LocalRuntime
from rlcore.errors import CapacityError, ConfigError


def _script(path, text):
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def _answering(tmp_path, **versions):
    """Write a script in place of another environment's interpreter; it always prints these versions."""
    return _script(tmp_path / "python", f"#!/bin/sh\necho '{json.dumps(versions)}'\n")


def test_an_environment_is_known_by_its_link_and_not_by_what_it_points_to(tmp_path, monkeypatch):
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    monkeypatch.setattr("rlcore.controller.interpreter._versions", lambda *_: _own())
    assert check_interpreter("rollout", os.path.relpath(link)) == str(link)


def _own():
    import platform
    from importlib import metadata

    return {"Python": platform.python_version(), "ray": metadata.version("ray"), "rlcore": metadata.version("rlcore")}


def test_the_same_environment_is_taken():
    assert check_interpreter("rollout", sys.executable) == os.path.abspath(sys.executable)


@pytest.mark.parametrize(
    ("other", "said", "to_type"),
    [
        ({"Python": "3.9.1"}, "has Python 3.9.1, but the controller has", "-m venv VENV"),
        ({"ray": "2.1.0"}, "has ray 2.1.0, but the controller has", '-m pip install "ray=='),
        ({"rlcore": ""}, "has rlcore (none), but the controller has", '-m pip install "rlcore=='),
    ],
)
def test_other_versions_are_refused_with_what_to_type(tmp_path, other, said, to_type):
    python = _answering(tmp_path, **(_own() | other))
    with pytest.raises(ConfigError) as caught:
        check_interpreter("rollout", python)
    first, second = str(caught.value).splitlines()
    assert first.startswith(f"pools.rollout.python={python} {said}")
    assert to_type in second


def test_what_is_no_python_is_named_with_its_last_words(tmp_path):
    python = _script(tmp_path / "python", "#!/bin/sh\necho no such option >&2\nexit 3\n")
    with pytest.raises(
        ConfigError, match=r"could not be run as a Python interpreter: no such option\nType  pools\.rollout\.python="
    ):
        check_interpreter("rollout", python)


def test_what_is_not_there_is_named():
    with pytest.raises(CapacityError, match=r"pools\.rollout\.python=/nowhere/python: there is no such interpreter"):
        check_interpreter("rollout", "/nowhere/python")


def test_one_process_has_one_interpreter():
    runtime = LocalRuntime(RuntimeConfig(name="local"))
    with pytest.raises(ConfigError, match=r"runtime=local runs everything in one process\nType  runtime=ray"):
        runtime.start({"main": PoolConfig(python=sys.executable)}, {})
