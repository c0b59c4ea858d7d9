"""A plugin that exits, crashes or hangs while it is imported is named, and the exit code is not 0."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rlcore.registry import refresh, resolve
from rlcore.registry.errors import PluginImportError
from rlcore.testing.waiting import HANG_S
from tests.distributions import REWARD, environment, plant, rlcore

ENDED = "error: this process ended while {} was being imported"
ENDINGS = {
    "segfault": ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", -11),
    "hang in Python": ("import time\ntime.sleep(600)", 1),
    "hang that holds the interpreter": ("import re\nre.match('(a*)*$', 'a' * 60 + 'b')", 1),
    "exit of a thread": (
        "import os, threading, time\nthreading.Thread(target=os._exit, args=(0,)).start()\ntime.sleep(60)",
        1,
    ),
}


def reward(site: Path, code: str) -> None:
    plant(site, "hostile-one", {"reward": {"hostile": "hostile_one:score"}}, code={"hostile_one": code + "\n" + REWARD})
    refresh()


def resolve_in_a_process(site: Path, ref: str, **variables: str) -> subprocess.CompletedProcess[str]:
    program = "import sys; from rlcore import resolve; resolve('reward', sys.argv[1])"
    return subprocess.run(
        [sys.executable, "-c", program, ref],
        env=environment(site, **variables),
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def test_os_exit_at_import_is_an_error_that_names_plugin_and_package(site):
    reward(site, "import os\nos._exit(0)")

    with pytest.raises(PluginImportError, match=r"reward 'hostile' \(hostile-one 1\.0\) .*os\._exit\(0\)"):
        resolve("reward", "hostile")


def test_os_exit_works_again_after_the_import(site):
    real = os._exit
    reward(site, "from os import _exit")

    resolve("reward", "hostile")

    assert os._exit is real
    program = "from rlcore import resolve; resolve('reward', 'hostile'); import hostile_one; hostile_one._exit(7)"
    done = subprocess.run([sys.executable, "-c", program], env=environment(site), timeout=HANG_S, check=False)
    assert done.returncode == 7, "the name that the plugin kept exits, too"


def test_a_child_that_a_plugin_forks_at_import_may_exit(site):
    reward(site, "import os\npid = os.fork()\nif not pid: os._exit(3)\ncode = os.waitpid(pid, 0)[1]")

    resolve("reward", "hostile")

    assert os.waitstatus_to_exitcode(sys.modules["hostile_one"].code) == 3


@pytest.mark.parametrize(("code", "expected"), ENDINGS.values(), ids=list(ENDINGS))
def test_a_process_that_ends_during_an_import_names_the_plugin(site, code, expected):
    reward(site, code)

    done = resolve_in_a_process(site, "hostile", RLCORE_IMPORT_TIMEOUT_S="2")

    assert done.returncode == expected
    assert ENDED.format("reward 'hostile' (hostile-one 1.0)") in done.stderr
    assert "rlcore doctor hostile-one" in done.stderr
    assert "pip uninstall hostile-one" in done.stderr
    assert "RLCORE_IMPORT_TIMEOUT_S" in done.stderr


def test_a_file_of_the_project_that_crashes_is_named(site):
    (site / "mine.py").write_text("import os\nos.abort()")

    done = resolve_in_a_process(site, f"{site}/mine.py:score")

    assert done.returncode == -6
    assert ENDED.format(f"reward '{site}/mine.py:score'") in done.stderr
    assert f"python -X faulthandler {site}/mine.py" in done.stderr


@pytest.mark.parametrize("code", ["", "1 / 0", "raise KeyboardInterrupt"])
def test_nothing_is_printed_when_the_process_lives(site, capfd, code):
    reward(site, code)

    with contextlib.suppress(PluginImportError, KeyboardInterrupt):
        resolve("reward", "hostile")

    assert capfd.readouterr() == ("", "")


def test_an_import_in_a_thread_is_guarded(site):
    reward(site, "import os\nos._exit(0)")
    errors = []

    def work():
        try:
            resolve("reward", "hostile")
        except PluginImportError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(timeout=HANG_S)

    assert len(errors) == 1


def test_a_plugin_that_imports_another_is_named_first(site):
    code = "from rlcore import resolve\nresolve('reward', 'second')\nimport os\nos._exit(0)"
    plant(site, "second-one", {"reward": {"second": "second_one:score"}}, code={"second_one": REWARD})
    reward(site, code)

    with pytest.raises(PluginImportError, match=r"reward 'hostile' \(hostile-one 1\.0\)"):
        resolve("reward", "hostile")


@pytest.mark.parametrize("value", ["never", "-1", "0", "nan", "1e99"])
def test_a_deadline_that_is_not_a_time_is_refused(site, monkeypatch, value):
    monkeypatch.setenv("RLCORE_IMPORT_TIMEOUT_S", value)
    reward(site, "")

    with pytest.raises(PluginImportError, match=f"RLCORE_IMPORT_TIMEOUT_S={value}"):
        resolve("reward", "hostile")


@pytest.mark.parametrize("arguments", [["train", "--dry-run"], ["train"], ["eval", "MODEL"]], ids=" ".join)
def test_a_command_whose_reward_exits_at_import_fails(site, assets, arguments):
    reward(site, "import os\nos._exit(0)")
    model = assets / "models" / "stories260k"
    (site / "data.jsonl").write_text('{"prompt": "One day"}\n')
    command, *rest = [str(model) if it == "MODEL" else it for it in arguments]
    data = ["data.eval"] if command == "eval" else [f"model.path={model}", f"run.directory={site}", "data.train"]

    done = rlcore(
        command, *rest, *data[:-1], f"{data[-1]}={site}/data.jsonl", "reward=hostile", "runtime=local", sites=[site]
    )

    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: reward 'hostile' (hostile-one 1.0) ")
    assert "rlcore doctor hostile-one" in done.stderr
