"""Execution of responses: tests decide, limits hold, and no file or process is left behind."""

import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from rlcore_rewards import sandbox
from rlcore_rewards.python import Python, PythonConfig, extract

from rlcore.errors import ConfigError, InfrastructureError, SampleError
from rlcore.testing import RewardContract
from rlcore.testing.waiting import HANG_S, wait_until

pytestmark = pytest.mark.skipif(bool(sandbox.supported()), reason=sandbox.supported() or "it is supported")
SQUARE = "So:\n```python\ndef f(x):\n    return x * x\n```"


class TestPython(RewardContract):
    target = "rlcore_rewards.python:Python"
    examples = (
        ({"completion": SQUARE, "tests": "assert f(3) == 9"}, 1.0),
        ({"completion": SQUARE, "tests": ["assert f(3) == 9", "assert f(3) == 8"]}, 0.0),
        ({"completion": "print(int(input()) + 1)", "tests": [{"input": "4\n", "output": "5"}]}, 1.0),
        ({"completion": "I do not know", "tests": "assert True"}, 0.0),
    )


def run(code, tests="assert True", **options):
    return Python(PythonConfig(**({"timeout_s": HANG_S} | options)))(f"```python\n{code}\n```", tests=tests)


ECHO = [{"input": "4\n", "output": "5"}]


@pytest.mark.parametrize(
    ("code", "tests"),
    [
        ("from __future__ import annotations\ndef f(x: Later): return x * x", "assert f(3) == 9"),
        (
            "import sys\ndef main():\n    print(int(input()) + 1)\nif __name__ == '__main__':\n    sys.exit(main())",
            ECHO,
        ),
        ("print(int(input()) + 1)\nexit()", ECHO),
        ("import sys\nprint('debug', file=sys.stderr)\nprint(int(input()) + 1)", ECHO),
        ("import re\nprint(int(re.findall('\\d', input())[0]) + 1)", ECHO),
    ],
    ids=["future", "exit", "exit of site", "stderr", "a warning"],
)
def test_right_answers_of_any_style_pass(code, tests):
    assert run(code, tests).value == 1.0


@pytest.mark.parametrize("end", ["raise ValueError", "import sys; sys.exit(3)", "import os; os._exit(1)"])
def test_a_program_that_fails_after_its_output_does_not_pass(end):
    assert run(f"print(5, flush=True)\n{end}", ECHO).value == 0.0


@pytest.mark.parametrize(
    "code",
    [
        "for name in os.listdir('.'): os.remove(name)",
        "[os.remove(it) for it in os.listdir('.')]; os.mkfifo('output')",
        "[os.remove(it) for it in os.listdir('.')]; os.symlink('/dev/zero', 'output')",
        "os.rmdir(os.getcwd())",
        "os.mkdir('d'); os.chmod('d', 0); os.chmod('.', 0)",
        "[(os.mkdir('d'), os.chdir('d')) for _ in range(3000)]",
    ],
)
def test_a_program_that_changes_its_directory_is_scored_and_leaves_no_files(code, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    found = run(f"import os\ntry:\n    {code}\nexcept OSError:\n    pass")

    assert found.value == 1.0
    assert list(tmp_path.iterdir()) == []


def test_score_share_is_the_fraction_of_passed_tests():
    assert run("f = abs", ["assert f(-1) == 1", "assert f(1) == 2"], score="share").value == 0.5


def test_the_last_block_counts_and_text_without_a_block_counts_only_if_it_is_code():
    assert extract("```python\n1\n```\nno, rather\n```python\n2\n```") == "2\n"
    assert extract("```python\nunfinished") == "unfinished"
    assert extract("x = 1") == "x = 1"
    assert extract("I think so.") is None
    assert extract("") is None


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "import os; os._exit(1)",
        "raise ValueError",
        "def f(:",
        "x = bytearray(10**9)",
        "while True: print('x' * 10**6)",
        "open('big', 'wb').write(b'x' * 10**8)",
        "import os; os.abort()",
    ],
)
def test_a_program_that_ends_before_its_tests_does_not_pass(code):
    assert run(code).value == 0.0


@pytest.mark.parametrize(
    "code", ["while True: pass", "import time; time.sleep(60)", "import threading; threading.Event().wait()"]
)
def test_a_program_that_runs_too_long_does_not_pass(code):
    found = run(code, timeout_s=0.7)

    assert (found.value, found.metrics["timeouts"]) == (0.0, 1.0)


REFUSED = {
    "socket": "import socket; socket.socket()",
    "unix socket": "import socket; socket.socket(socket.AF_UNIX)",
    "http": "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9')",
    "socket of a child": "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import socket; socket.socket()'], check=True)",
    "kill": "import os; os.kill(os.getppid(), 9)",
    "new session": "import os; os.setsid()",
    "new process group": "import os; os.setpgid(0, 0)",
    "limits of another process": "import os, resource; resource.prlimit(os.getppid(), resource.RLIMIT_CPU)",
}
SYSTEM_CALL = (
    "import ctypes, os; libc, pid = ctypes.CDLL(None, use_errno=True), os.getppid()\n"
    "    if libc.syscall({number}, pid, {rest}) == -1 and ctypes.get_errno() == 1: raise PermissionError"
)
NUMBERS = {
    "x86_64": {"tkill": 200, "tgkill": 234, "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297},
    "aarch64": {"tkill": 130, "tgkill": 131, "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240},
}
"""System call numbers of the kernel's unistd.h."""
ARGUMENTS = {"tkill": "0", "tgkill": "pid, 0", "rt_sigqueueinfo": "0, None", "rt_tgsigqueueinfo": "pid, 0, None"}
REFUSED |= {
    name: SYSTEM_CALL.format(number=number, rest=ARGUMENTS[name])
    for name, number in NUMBERS.get(platform.machine(), {}).items()
}
OWN = {
    "its own limits": "import resource; resource.setrlimit(resource.RLIMIT_STACK, resource.prlimit(0, resource.RLIMIT_STACK))",
    "dev null": "import subprocess; subprocess.run(['true'], stdout=subprocess.DEVNULL, check=True)",
    "its directory": "import os; os.mkdir('a'); open('a/b', 'w').write('x'); os.rename('a/b', 'b'); os.truncate('b', 0); os.remove('b')",
    "temporary files": "import tempfile; tempfile.TemporaryDirectory().cleanup(); tempfile.NamedTemporaryFile().write(b'x')",
    "threads": "import threading; it = threading.Thread(target=int); it.start(); it.join()",
}
OUTSIDE = {
    "removes": "os.remove('{dir}/victim')",
    "removes all": "import shutil; shutil.rmtree('{dir}')",
    "writes": "open('{dir}/victim', 'a').write('x')",
    "truncates": "os.truncate('{dir}/victim', 0)",
    "creates": "open('{dir}/new', 'w')",
    "makes a directory": "os.mkdir('{dir}/d')",
    "renames": "os.rename('{dir}/victim', '{dir}/v')",
    "moves into its directory": "os.rename('{dir}/victim', 'v')",
    "through a link": "os.symlink('{dir}/victim', 'l'); open('l', 'w')",
    "through a child": "import subprocess; subprocess.run(['rm', '{dir}/victim'], check=True)",
}


@pytest.mark.parametrize("code", REFUSED.values(), ids=REFUSED)
def test_a_refused_call_raises_an_error_in_the_program(code):
    body = f"try:\n    {code}\nexcept Exception as error:\n    raised = repr(error)\nelse:\n    raised = ''"

    assert run(body, "assert raised").value == 1.0


@pytest.mark.parametrize("code", OWN.values(), ids=OWN)
def test_a_program_may_use_its_own_resources(code):
    assert run(code).value == 1.0


@pytest.mark.skipif(bool(sandbox.missing()), reason=f"without {sandbox.missing()}")
@pytest.mark.parametrize("code", OUTSIDE.values(), ids=OUTSIDE)
def test_files_outside_its_directory_cannot_be_changed(code, tmp_path):
    (tmp_path / "victim").write_text("mine")
    body = f"import os\ntry:\n    {code.format(dir=tmp_path)}\nexcept Exception as error:\n    raised = repr(error)"

    assert run(body, "assert raised").value == 1.0
    assert [(it.name, it.read_text()) for it in tmp_path.iterdir()] == [("victim", "mine")]


@pytest.mark.skipif(bool(sandbox.missing()), reason=f"without {sandbox.missing()}")
@pytest.mark.parametrize(
    ("each", "count", "limits", "over"),
    [
        ("time.sleep(1000)", 40, {}, 1.0),
        ("time.sleep(0.3)", 10, {}, 0.0),
        ("x = b'1' * 60_000_000; time.sleep(1000)", 6, {"memory_mb": 200}, 1.0),
    ],
    ids=["many", "some", "large"],
)
def test_number_and_total_memory_of_processes_are_limited(each, count, limits, over):
    code = f"import os, time\nfor _ in range({count}):\n    if os.fork() == 0:\n        {each}\n        os._exit(0)\n"
    code += f"for _ in range({count}): os.wait()"
    found = run(code, **limits)

    assert (found.value, found.metrics["overruns"], found.metrics["timeouts"]) == (1.0 - over, over, 0.0)


def test_missing_kernel_features_are_logged(monkeypatch, caplog):
    monkeypatch.setattr(sandbox, "landlock", lambda libc: -1)

    Python(PythonConfig())

    assert "this machine has no Landlock (Linux 5.13): programs can write and remove all files" in caplog.text


def test_a_kernel_without_seccomp_is_an_error_and_not_a_wrong_answer(monkeypatch, tmp_path):
    source = (
        Path(sandbox.__file__)
        .read_text()
        .replace("_SECCOMP, _PARENT_DEATH = 38, 22, 1", "_SECCOMP, _PARENT_DEATH = 38, 9999, 1")
    )
    (tmp_path / "sandbox.py").write_text(source)
    monkeypatch.setattr(sandbox, "__file__", str(tmp_path / "sandbox.py"))

    with pytest.raises(
        InfrastructureError, match=r"cannot start a program: OSError: .* the kernel rejected the seccomp"
    ):
        run("pass")


def test_without_the_filter_the_same_program_opens_a_socket(monkeypatch):
    """The tests of refused calls would pass even if sockets always failed."""
    plain = subprocess.run([sys.executable, "-c", REFUSED["socket"]], check=False, timeout=HANG_S)

    assert plain.returncode == 0


def test_a_program_does_not_see_the_environment_variables_of_the_trainer(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "x")

    assert run("import os", "assert 'SECRET_TOKEN' not in os.environ").value == 1.0


def processes(mark):
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark in path.read_bytes().decode(errors="replace"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def wait_until_gone(mark):
    wait_until(lambda: not processes(mark))


@pytest.mark.parametrize("waits", [False, True], ids=["the program ends", "the program is killed"])
def test_children_end_with_the_program(waits):
    mark = f"7{os.getpid()}.{int(waits)}"
    code = f"import subprocess, os\nif os.fork() == 0: os.execvp('sleep', ['sleep', '{mark}'])\nsubprocess.Popen(['sleep', '{mark}'])"
    code += "\nimport time; time.sleep(1000)" if waits else ""

    run(code, timeout_s=5.0)

    wait_until_gone(mark)


def test_the_program_and_its_children_end_when_the_reward_process_is_killed(tmp_path):
    mark = f"8{os.getpid()}.5"
    code = f"import subprocess, time; subprocess.Popen(['sleep', '{mark}']); time.sleep(1000)"
    source = f"from rlcore_rewards.python import *\nPython(PythonConfig(timeout_s=1000))({code!r}, tests='')"
    reward = subprocess.Popen([sys.executable, "-c", source], env={**os.environ, "TMPDIR": str(tmp_path)})
    wait_until(lambda: len(processes(mark)) >= 2)

    reward.kill()
    reward.wait(timeout=HANG_S)

    wait_until_gone(mark)


@pytest.mark.parametrize("tests", [[], [3], [{"input": "x"}], None])
def test_tests_of_another_form_are_a_sample_error(tests):
    with pytest.raises(SampleError, match="column 'tests' holds"):
        run("pass", tests)


def test_the_filter_consists_of_whole_instructions():
    for machine in ("x86_64", "aarch64"):
        assert len(sandbox.filter_program(machine)) % 8 == 0


def test_an_unsupported_machine_is_refused_at_the_start(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")

    with pytest.raises(ConfigError, match="cannot run code on this machine: it needs Linux, and this is darwin\nUse"):
        Python(PythonConfig())


@pytest.mark.parametrize(
    "options", [{"timeout_s": 0}, {"memory_mb": 1}, {"cpu_s": 0}, {"file_mb": 0}, {"processes": 0}, {"score": "some"}]
)
def test_invalid_limits_are_refused(options):
    with pytest.raises(ConfigError, match=f"{next(iter(options))}: expected"):
        PythonConfig(**options)


def test_examples_are_json_serializable():
    assert json.loads(json.dumps(TestPython.examples))
