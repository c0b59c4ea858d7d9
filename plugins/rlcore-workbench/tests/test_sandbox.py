"""Sandbox of `rlcore migrate --execute`: it records what a script starts, and nothing leaves it."""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rlcore_workbench.migrate import main
from rlcore_workbench.migration import sandbox
from rlcore_workbench.migration.sandbox import execute

from rlcore.errors import ConfigError

PPO = "python3 -m verl.trainer.main_ppo"


def isolates():
    """Return whether this machine permits the namespaces of the sandbox."""
    words = ["unshare", *sandbox.namespaces(), "true"]
    return bool(shutil.which("unshare")) and subprocess.run(words, capture_output=True).returncode == 0


needs_namespaces = pytest.mark.skipif(not isolates(), reason="needs user namespaces")


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Write a script to a directory of its own, and return its path."""
    monkeypatch.chdir(tmp_path)

    def write(text):
        path = tmp_path / "run.sh"
        path.write_text(text)
        return path

    return write


def words_of(path, *arguments, **options):
    commands, _ = execute(path, arguments, **options)
    return [[word.text for word in command.words] for command in commands]


@needs_namespaces
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("for i in 1 2; do N=$i; done\ntrainer x=$N", [["trainer", "x=2"]]),
        ('trainer "a b" \'\' $1 "${@:2}"', [["trainer", "a b", "", "8", "c", "d"]]),
        ("N=$(( 2 ** 10 )); A=abc; trainer $N ${A%c} ${A^^}", [["trainer", "1024", "ab", "ABC"]]),
        ("nohup python3 -m m x=1", [["python3", "-m", "m", "x=1"]]),
        ("until ray status; do sleep 99; done\nexec torchrun y", [["ray", "status"], ["torchrun", "y"]]),
        ("set -e\nmkdir -p out\nexec > >(tee out/log) 2>&1\ntrainer $(basename $PWD/z)", [["trainer", "z"]]),
    ],
)
def test_commands_are_recorded_as_bash_runs_them(script, text, expected):
    assert words_of(script(text), "8", "c", "d") == expected


@needs_namespaces
def test_nothing_is_written_outside(script, tmp_path):
    home, shared = Path.home() / "rlcore-sandbox-test", Path("/tmp/rlcore-sandbox-test")
    path = script(
        "echo x > here; echo x > ~/rlcore-sandbox-test; echo x > /tmp/rlcore-sandbox-test; rm -f run.sh\n"
        "echo x > /etc/rlcore-sandbox-test; mkdir /usr/rlcore-sandbox-test; trainer $(cat here)"
    )

    assert words_of(path) == [["trainer", "x"]]

    places = [home, shared, Path("/etc/rlcore-sandbox-test"), Path("/usr/rlcore-sandbox-test"), tmp_path / "here"]
    assert [place for place in places if place.exists()] == []
    assert path.is_file()


@needs_namespaces
def test_no_network_is_reached(script):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        path = script(
            f"if (echo x > /dev/tcp/127.0.0.1/{port}) 2>/dev/null; then trainer online; else trainer none; fi"
        )

        assert words_of(path) == [["trainer", "none"]]


@needs_namespaces
def test_no_capability_and_no_process_of_the_machine_is_left(script):
    path = script(
        f"trainer $(grep CapEff /proc/self/status | awk '{{print $2}}') $(ls -d /proc/{os.getpid()} 2>/dev/null)"
    )

    assert words_of(path) == [["trainer", "0000000000000000"]]


@needs_namespaces
@pytest.mark.parametrize("file", ["/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/sys/kernel/hostname"])
def test_settings_of_the_kernel_are_read_only(script, file):
    path = script(f"[ -w {file} ] && trainer writable\n(: >> {file}) 2>/dev/null && trainer opened\ntrainer end")

    assert words_of(path) == [["trainer", "end"]]


@needs_namespaces
def test_a_script_does_not_run_as_root_of_the_machine(script):
    path = script("while read -r _ outside _; do trainer $(id -u) $outside; done < /proc/self/uid_map")

    ((_, inside, outside),) = words_of(path)

    assert (inside, outside) == (("65534", "0") if os.geteuid() == 0 else ("0", str(os.geteuid())))


@needs_namespaces
def test_a_script_signals_only_its_own_processes(script):
    assert words_of(script("trap 'kill 0' EXIT\ntrainer x")) == [["trainer", "x"]]


@needs_namespaces
def test_programs_in_the_background_are_recorded(script):
    path = script('(for i in {1..20000}; do :; done; trainer late) &\nnohup python3 -m m "$(seq 3000)" &')

    late, (name, *_, numbers) = sorted(words_of(path), key=len)

    assert (late, name, len(numbers.split())) == (["trainer", "late"], "python3", 3000)


@needs_namespaces
@pytest.mark.parametrize(
    "text",
    [
        "/usr/bin/python3 x",
        "PATH=/bin:/usr/local/bin python3 x",
        "export PATH=/nowhere\npython3 x",
        "env -i /bin/python3 x",
        f"{sys.executable} x",
        "cp /usr/bin/python3 . && bash ./python3 x",
    ],
)
def test_no_real_python_runs(script, text):
    ((name, argument),) = words_of(script(text))

    assert (name[:6], argument) == ("python", "x")


@needs_namespaces
def test_programs_beside_the_script_do_not_run(script, tmp_path):
    shutil.copy("/bin/true", tmp_path / "tool")

    assert words_of(script("./tool || trainer refused")) == [["trainer", "refused"]]


@needs_namespaces
def test_the_number_of_processes_is_limited(script):
    many = "for i in {1..%d}; do tail -f /dev/null & done\ntrainer x"

    commands, remarks = execute(script(many % 20), limit_s=2.0)
    with pytest.raises(ConfigError, match="did not end within 2 s"):
        execute(script(many % 300), limit_s=2.0)  # bash tries again and again to start one more

    assert len(commands) == 1
    assert remarks[1:] == ["processes in the background were stopped after 2 s"]


def test_a_process_that_hangs_is_ended_with_its_children(script, monkeypatch, tmp_path):
    (tmp_path / "unshare").write_text(f"#!/bin/sh\n(sleep 1; touch {tmp_path}/late) & wait\n")
    (tmp_path / "unshare").chmod(0o755)
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: str(tmp_path / name))
    monkeypatch.setattr(sandbox, "START_S", 0.5)

    with pytest.raises(ConfigError, match="did not start or end in time"):
        execute(script("trainer"), limit_s=0.0)

    time.sleep(1.0)
    assert not (tmp_path / "late").exists()


@needs_namespaces
def test_a_dollar_sign_of_an_executed_script_is_not_printed(script, capsys):
    path = script(f"{PPO} data.train_files='x$(touch pwned)' trainer.experiment_name='a`b`'")

    main(["--execute", str(path), "--command-only"])

    assert "data.train" not in (printed := capsys.readouterr().out)
    assert "'run.name=a`b`'" in printed


@needs_namespaces
def test_a_script_that_does_not_end_is_stopped(script):
    with pytest.raises(ConfigError, match="did not end within 1 s in the sandbox"):
        execute(script("while true; do :; done"), limit_s=1.0)


@needs_namespaces
def test_a_script_that_fails_is_reported(script):
    _, remarks = execute(script("trainer\necho broken >&2\nexit 3"))
    with pytest.raises(
        ConfigError, match=r"started no program in the sandbox\nthe script ended with exit code 4: usage"
    ):
        execute(script("echo usage >&2; exit 4"))

    assert remarks[1:] == ["the script ended with exit code 3: broken"]


@needs_namespaces
def test_the_branch_that_bash_takes_is_translated(script, capsys):
    path = script(
        f'if [ "$(nvidia-smi | wc -l)" -gt 0 ]; then N=8; else N=1; fi\n{PPO} data.train_files=/d trainer.nnodes=$N'
    )

    main(["--execute", str(path), "--command-only"])

    assert "pools.main.nodes=1" in capsys.readouterr().out


def test_a_machine_without_isolation_refuses(script, monkeypatch):
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)

    with pytest.raises(ConfigError, match="cannot isolate the script: it needs Linux and the program unshare"):
        execute(script("trainer"))


def test_a_kernel_that_permits_no_namespaces_refuses(script, monkeypatch, tmp_path):
    (tmp_path / "unshare").write_text("#!/bin/sh\necho 'unshare: Operation not permitted' >&2\nexit 1\n")
    (tmp_path / "unshare").chmod(0o755)
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: str(tmp_path / name))

    with pytest.raises(ConfigError, match="cannot isolate the script: unshare: Operation not permitted"):
        execute(script("trainer"))
