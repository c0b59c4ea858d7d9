"""`rlcore doctor`: a bad plugin does not affect other checks, and each finding has a fix."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from distributions import REWARD, plant, write_module
from rlcore_workbench import doctor
from rlcore_workbench.doctor import SETTINGS, Finding, check_all, main
from rlcore_workbench.health import isolated, machine
from rlcore_workbench.health.settings import check_settings

from rlcore.config.schema import RunConfig
from rlcore.registry import refresh
from rlcore.testing.waiting import HANG_S

HOOKS = """
from rlcore import hookimpl
from rlcore.hooks import Check
def fail(): raise OSError("no license")
@hookimpl
def rlcore_health_checks():
    return [Check(name="license", run=%s, fix="export LICENSE=...")]
"""


def reward(site: Path, package: str, code: str, **options) -> None:
    module = package.replace("-", "_")
    plant(site, package, {"reward": {package: f"{module}:score"}}, code={module: code}, **options)


@pytest.fixture(scope="module")
def findings(tmp_path_factory, rlcore) -> dict[str, dict]:
    """Return the findings of doctor --plugins with many broken packages, by package, or rlcore/<kind>/<name>."""
    site = tmp_path_factory.mktemp("site")
    reward(site, "fine-one", "print('noise', flush=True)\n" + REWARD)
    reward(site, "raising-one", "1 / 0")
    reward(site, "leaving-one", "import posix\nposix._exit(0)")
    reward(site, "exiting-one", "import os\nos._exit(0)")
    reward(
        site, "dying-one", "import os, signal\nprint('last words', flush=True)\nos.kill(os.getpid(), signal.SIGSEGV)"
    )
    reward(
        site,
        "lasting-one",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()\n" + REWARD,
    )
    reward(site, "needy-one", "import absent_dependency", requires=["rlcore>=0.1", "absent_dependency; extra == 'all'"])
    reward(site, "far-one", REWARD, requires=["rlcore>=99"])
    reward(site, "free-one", REWARD, requires=[])
    reward(site, "hidden-one", "raise AssertionError")
    plant(site, "lame-one", {"tracker": {"lame": "lame_one:T"}}, code={"lame_one": "class T: ..."})
    plant(site, "vague-one", {"reward": {"vague": "vague_one"}})
    three = {"a": "three_one:score", "b": "three_bad:score", "c": "three_one:score"}
    plant(site, "three-one", {"reward": three}, code={"three_one": REWARD, "three_bad": "import os\nos.abort()"})
    plant(site, "well-hooks", {"hooks": {"well": "well_hooks"}}, code={"well_hooks": HOOKS % "lambda: 'valid'"})
    plant(site, "ill-hooks", {"hooks": {"ill": "ill_hooks"}}, code={"ill_hooks": HOOKS % "fail"})
    plant(site, "conf-one", {"config": {"conf": "conf_one"}}, code={"conf_one.never": "raise AssertionError"})
    (site / "conf_one" / "conf" / "preset").mkdir(parents=True)
    (site / "conf_one" / "conf" / "preset" / "mine.yaml").write_text("trainer: {steps: 1}\n")
    plant(site, "bare-conf", {"config": {"bare": "bare_conf"}}, code={"bare_conf.x": ""})

    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = rlcore("doctor", "--plugins", "--json", PYTHONPATH=path, RLCORE_DISABLE_PLUGINS="hidden-one")

    assert done.returncode == 1, done.stderr
    found = {}
    for item in json.loads(done.stdout):
        alone = item["package"] not in ("", "rlcore", "three-one")
        found[item["package"] if alone else f"{item['package']}/{item['kind']}/{item['name']}"] = item
    return found


@pytest.mark.parametrize(
    ("package", "status", "detail"),
    [
        ("fine-one", "ok", ""),
        ("raising-one", "broken", "failed to import: ZeroDivisionError: division by zero"),
        ("exiting-one", "broken", "failed to import: SystemExit: os._exit(0) was called"),
        ("leaving-one", "broken", "the process ended with exit code 0"),
        ("dying-one", "broken", "the process ended with signal SIGSEGV"),
        ("needy-one", "broken", "    pip install 'needy-one[all]'"),
        ("far-one", "broken", "was written for rlcore>=99"),
        ("free-one", "warning", "unbounded: does not declare the rlcore versions"),
        ("hidden-one", "disabled", "RLCORE_DISABLE_PLUGINS=hidden-one"),
        ("lame-one", "broken", "does not meet the Tracker protocol: no method start; no method log"),
        ("vague-one", "broken", "'vague_one' is not module:attribute"),
        ("three-one/reward/a", "ok", ""),
        ("three-one/reward/b", "broken", "the process ended with signal SIGABRT"),
        ("three-one/reward/c", "ok", ""),
        ("well-hooks", "ok", "license: valid"),
        ("ill-hooks", "broken", "license: OSError: no license"),
        ("conf-one", "ok", "1 files"),
        ("bare-conf", "broken", "there is no conf/ with YAML files in bare-conf"),
    ],
)
def test_each_plugin_is_checked_independently(findings, package, status, detail):
    found = findings[package]

    assert found["status"] == status
    assert detail in found["detail"]


def test_built_in_plugins_are_ok_next_to_broken_ones(findings):
    built_in = {name: it["status"] for name, it in findings.items() if name.startswith("rlcore/")}

    assert len(built_in) > 20
    assert {name: status for name, status in built_in.items() if status not in ("ok", "slow")} == {}


def test_every_broken_check_has_a_fix(findings):
    silent = [
        name
        for name, it in findings.items()
        if it["status"] == "broken"
        and not it["fix"]
        and not any(w in it["detail"] for w in ("pip ", "rlcore ", "python "))
    ]

    assert silent == []
    assert findings["dying-one"]["fix"] == "pip install --force-reinstall dying-one"
    assert findings["ill-hooks"]["fix"] == "export LICENSE=..."


def test_a_crash_keeps_the_output_and_the_stack(findings):
    assert "last words" in findings["dying-one"]["traceback"]
    assert "dying_one.py" in findings["dying-one"]["traceback"], "faulthandler names the line"
    assert "ZeroDivisionError" in findings["raising-one"]["traceback"]


def test_the_machine_is_checked_first_and_in_a_fixed_order(findings):
    names = [name.removeprefix("/machine/") for name in findings if name.startswith("/machine/")]

    assert names == list(machine.CHECKS)
    always = ("python", "torch", "ray", "transformers", "requirements", "devices")
    for name in (*always, "temporary files", "network", "ray start"):
        assert findings[f"/machine/{name}"]["status"] == "ok", findings[f"/machine/{name}"]
    assert "pluggy" in findings["/machine/requirements"]["detail"]


def test_json_keys_are_the_documented_ones(findings):
    keys = ["kind", "name", "package", "version", "target", "status", "detail", "fix", "seconds", "traceback"]

    assert {tuple(it) for it in findings.values()} == {tuple(keys)} == {tuple(Finding.__dataclass_fields__)}


def test_each_result_is_printed_at_once(site, capsys, monkeypatch):
    def judge(jobs, *_):
        name = jobs[0][2]
        if name == "last-one":
            assert printed.wait(timeout=HANG_S), "the other result must be printed while this check is running"
        return [{"status": "ok", "detail": "", "seconds": 0.0}], "", ""

    printed, own_print = threading.Event(), print

    def spy(*words, **options):
        own_print(*words, **options)
        if words[0].startswith("ok        reward next-one"):
            printed.set()

    for package in ("last-one", "next-one"):
        reward(site, package, REWARD)
    refresh()
    monkeypatch.setattr(doctor, "run_jobs", judge)
    monkeypatch.setattr(doctor, "_AT_ONCE", 2)
    monkeypatch.setattr("builtins.print", spy)

    assert main(["last-one", "next-one"]) == 0

    first, second, summary = capsys.readouterr().out.splitlines()
    assert first.startswith("ok        reward next-one (next-one 1.0)")
    assert second.startswith("ok        reward last-one (last-one 1.0)")
    assert summary == "2 checks: all ok"


def test_running_checks_are_named_on_stderr(site, capsys):
    reward(site, "fine-one", REWARD)
    refresh()

    main(["fine-one", "--json"])

    done = capsys.readouterr()
    assert done.err == "checking fine-one: reward fine-one ...\n"
    assert json.loads(done.out)[0]["status"] == "ok"


@pytest.mark.parametrize("asked", ["raising-one", "Raising_One", "boom"])
def test_a_package_or_a_plugin_is_checked_alone_and_shows_the_whole_traceback(site, capsys, asked):
    plant(
        site, "raising-one", {"reward": {"boom": "raising_one:score"}}, code={"raising_one": "x = 1\n1 / 0  # here\n"}
    )
    refresh()

    assert main([asked]) == 1

    out = capsys.readouterr().out
    assert out.startswith("broken    reward boom (raising-one 1.0)  reward 'boom' (raising-one 1.0) failed to import")
    assert "1 / 0  # here" in out
    assert out.endswith("1 checks: 1 broken\n")


def test_an_unknown_plugin_is_refused_with_the_nearest(rlcore):
    done = rlcore("doctor", "rlcor")

    assert done.returncode == 2
    assert (
        done.stderr
        == "error: no plugin or package 'rlcor' is installed. Did you mean 'rlcore'?\nType  rlcore list-plugins\n"
    )


def test_a_slow_plugin_is_reported_but_not_a_failure(site, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "SLOW_S", 0.3)
    reward(site, "slow-one", "import time\ntime.sleep(0.4)\n" + REWARD)
    refresh()

    assert main(["slow-one"]) == 0

    slow, fix, last = capsys.readouterr().out.splitlines()
    assert slow.startswith("slow      reward slow-one (slow-one 1.0)  loads in ")
    assert fix == "          to type:  python -X importtime -c 'import slow_one'"
    assert last == "1 checks: 1 slow"


def test_a_hanging_plugin_and_its_processes_are_ended_at_the_deadline(site, capsys):
    seconds = f"987.{os.getpid()}"
    started = f"import subprocess, time\nsubprocess.Popen(['sleep', '{seconds}'])\ntime.sleep(600)"
    points = {
        "reward": {"after": "hanging_fine:score", "hang": "hanging_one:score"},
        "tracker": {"x": "hanging_fine:T"},
    }
    plant(site, "hanging-one", points, code={"hanging_one": started, "hanging_fine": REWARD + "class T: ..."})
    refresh()

    assert main(["hanging-one", "--timeout", "10", "--json"]) == 1

    found = {it["name"]: it for it in json.loads(capsys.readouterr().out)}
    assert found["after"]["status"] == "ok"
    assert (found["hang"]["status"], found["hang"]["detail"]) == ("broken", "no answer in 10 s")
    assert found["hang"]["fix"] == "rlcore doctor hanging-one --timeout 40"
    assert "no method start" in found["x"]["detail"], "the next plugin is checked in a new process"
    commands = [_command(process) for process in Path("/proc").glob("[0-9]*")]
    assert f"sleep\0{seconds}\0".encode() not in commands


def _command(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:  # the process ended in the meantime
        return b""


def test_a_plugin_that_leaves_a_thread_running_is_not_waited_for(site):
    reward(
        site,
        "lasting-one",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()\n" + REWARD,
    )
    refresh()

    assert main(["lasting-one", "--timeout", str(HANG_S)]) == 0


def test_duplicate_plugins_are_both_checked_and_give_a_warning(site, capsys):
    for package in ("left-one", "right-one"):
        module = package.replace("-", "_")
        plant(site, package, {"reward": {"twice": f"{module}:score"}}, code={module: REWARD})
    refresh()

    assert main(["twice", "--json"]) == 0

    found = {it["package"]: (it["status"], it["detail"]) for it in json.loads(capsys.readouterr().out)}
    assert found == {
        "left-one": ("warning", "duplicate: also right-one 1.0; use twice@left-one"),
        "right-one": ("warning", "duplicate: also left-one 1.0; use twice@right-one"),
    }


def test_a_file_in_the_working_directory_does_not_shadow_a_module(site, monkeypatch):
    elsewhere = site / "elsewhere"
    write_module(elsewhere, "json", "raise AssertionError('the wrong json')")
    monkeypatch.chdir(elsewhere)
    reward(site, "fine-one", REWARD)
    refresh()

    assert main(["fine-one"]) == 0


def test_an_interrupt_ends_the_child_at_once(site):
    reward(site, "hanging-one", "import time\ntime.sleep(1000)")
    refresh()
    began = time.monotonic()

    def interrupt(*_):
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    try:
        with pytest.raises(KeyboardInterrupt):
            main(["hanging-one", "--timeout", "1000"])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)

    assert time.monotonic() - began < HANG_S


def test_help_shows_an_example(rlcore):
    done = rlcore("doctor", "--help")

    assert done.returncode == 0
    assert "  rlcore doctor rlcore-vllm              the plugins of one package, with tracebacks" in done.stdout


def test_the_default_directory_is_that_of_a_run():
    assert doctor._parser().parse_args([]).output == RunConfig().directory


def test_an_unwritable_directory_is_broken(tmp_path):
    file = tmp_path / "file"
    file.touch()

    (finding,) = check_all([Finding(kind="machine", name="disk")], 60.0, str(file / "runs"))

    assert (finding.status, finding.fix) == ("broken", "rlcore train run.directory=DIR ...")
    assert finding.detail == f"{file}/runs cannot be written"


GIB = 2**30


@pytest.mark.parametrize(
    ("free", "error", "words"),
    [
        (50 * GIB, None, "50.0 GiB free for"),
        (9 * GIB, machine.Remark, "9.0 GiB free for .*; checkpoints of a large model need more"),
        (GIB // 2, machine.Fault, "0.5 GiB free for"),
    ],
)
def test_free_disk_space_decides_the_status(tmp_path, monkeypatch, free, error, words):
    usage = machine.shutil.disk_usage(tmp_path)._replace(free=free)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: usage)

    if error is None:
        assert words in machine.CHECKS["disk"](str(tmp_path / "new" / "runs"))
        return
    with pytest.raises(machine.Remark, match=words) as caught:
        machine.CHECKS["disk"](str(tmp_path / "new" / "runs"))
    assert type(caught.value) is error


def test_little_shared_memory_gives_a_warning(monkeypatch):
    usage = machine.shutil.disk_usage("/")._replace(free=GIB // 16)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: usage)

    with pytest.raises(machine.Remark, match=r"0\.06 GiB free in /dev/shm") as caught:
        machine.CHECKS["shared memory"]("")
    assert caught.value.fix == "docker run --shm-size=8g ..."


@pytest.mark.parametrize(
    ("words", "remark"),
    [
        ("1", None),
        (str(len(os.sched_getaffinity(0))), None),
        ("", "OMP_NUM_THREADS is not set: each process starts"),
        ("4096", "OMP_NUM_THREADS=4096, but there are"),
        ("many", "OMP_NUM_THREADS=many, but there are"),
    ],
)
def test_threads_are_compared_with_the_cores(monkeypatch, words, remark):
    monkeypatch.setenv("OMP_NUM_THREADS", words)

    if remark is None:
        assert machine.CHECKS["threads"]("").startswith(f"OMP_NUM_THREADS={words} of ")
        return
    with pytest.raises(machine.Remark, match=remark) as caught:
        machine.CHECKS["threads"]("")
    assert caught.value.fix.startswith("export OMP_NUM_THREADS=")


@pytest.mark.parametrize(
    ("check", "package", "error", "words", "fix"),
    [
        ("torch", "torch", machine.Fault, "1.0, but rlcore needs >=", "pip install 'torch>="),
        ("ray", "ray", machine.Remark, "1.0, but rlcore needs .*; only runtime=local works", "pip install 'ray>="),
        ("requirements", "pluggy", machine.Fault, "1.0, but rlcore needs", "pip install 'pluggy>="),
    ],
)
def test_an_unsupported_version_names_the_one_to_install(site, check, package, error, words, fix):
    plant(site, package, {}, requires=[])

    with pytest.raises(machine.Remark, match=words) as caught:
        machine.CHECKS[check]("")

    assert type(caught.value) is error
    assert caught.value.fix.startswith(fix)


def answers(*settings: str) -> dict[str, dict]:
    """Return the answers of the doctor's child process."""
    return {name: isolated._answer(partial(check_settings, name, settings), ".") for name in SETTINGS}


def test_accepts_valid_settings_of_a_run(assets, tmp_path):
    (tmp_path / "d.jsonl").write_text('{"prompt": "One day", "answer": "a"}\n')
    found = answers(
        f"model.path={assets}/models/stories260k",
        f"data.train={tmp_path}/d.jsonl",
        "reward=exact_match",
        "runtime=local",
        f"run.directory={tmp_path}/runs",
    )

    assert {name: finding["status"] for name, finding in found.items()} == dict.fromkeys(SETTINGS, "ok")
    assert "0.26 M parameters" in found["model"]["detail"]
    assert found["tokenizer"]["detail"] == "512 tokens, without a chat template"
    assert found["data"]["detail"] == f"{tmp_path}/d.jsonl: 1 prompts"
    assert found["reward"]["detail"] == "exact_match (rlcore.rewards.match:ExactMatch)"
    assert not (tmp_path / "runs").exists()


def test_reports_all_problems_at_once(assets, tmp_path):
    (tmp_path / "d.jsonl").write_text('{"prompt": "One day"}\n{\n')
    found = answers(f"model.path={tmp_path}/nowhere", f"data.train={tmp_path}/d.jsonl", f"reward={tmp_path}/r.py:score")

    assert {name: finding["status"] for name, finding in found.items()} == {
        "settings": "ok",
        **dict.fromkeys(["model", "tokenizer", "data", "reward", "plan"], "broken"),
    }
    assert "there is no such directory" in found["model"]["detail"]
    assert f"{tmp_path}/d.jsonl:2: not valid JSON" in found["data"]["detail"]
    assert f"there is no file {tmp_path}/r.py" in found["reward"]["detail"]


def test_checks_incomplete_settings(assets):
    found = answers(f"model.path={assets}/models/stories260k", "reward=exact_match")

    assert {name: finding["status"] for name, finding in found.items()} == {
        **dict.fromkeys(["settings", "model", "tokenizer", "reward"], "ok"),
        "data": "warning",
        "plan": "broken",
    }
    assert found["data"]["fix"] == "rlcore doctor data.train=..."
    assert found["plan"]["fix"].startswith("data.train=train.jsonl")


def test_reports_only_the_misspelled_setting():
    found = answers("preset=quickstart", "trainer.step=3")

    assert found["settings"]["status"] == "broken"
    assert found["settings"]["detail"].startswith("trainer.step: no such setting. Did you mean 'steps'?")
    assert {finding["status"] for name, finding in found.items() if name != "settings"} == {"warning"}


def test_reports_a_plan_that_does_not_fit_this_machine():
    found = answers("preset=quickstart", "pools.main.nodes=2")

    assert {name for name, finding in found.items() if finding["status"] == "broken"} == {"plan"}
    assert "1 CPU on each of 2 nodes; the cluster has " in found["plan"]["detail"]


@pytest.mark.parametrize(
    ("check", "variables", "status", "detail", "fix"),
    [
        ("network", {}, "ok", r"lo \(127\.0\.0\.1:\d+\) reaches itself", ""),
        ("network", {"GLOO_SOCKET_IFNAME": "eth77"}, "broken", "GLOO_SOCKET_IFNAME=eth77 does not exist, only ", "unset GLOO_SOCKET_IFNAME"),
        ("temporary files", {}, "ok", r"GiB free for /", ""),
    ],
    ids=["network", "an interface that does not exist", "temporary files"],
)  # fmt: skip
def test_checks_network_and_temporary_files(monkeypatch, check, variables, status, detail, fix):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    (found,) = check_all([Finding(kind="machine", name=check)], 60.0, ".")

    assert found.status == status, found
    assert re.search(detail, found.detail)
    assert found.fix == fix


def test_names_the_interface_that_a_cluster_would_use(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr("rlcore.controller.network.address_toward", lambda host: "127.0.0.1")
    pattern = r"lo \(127.0.0.1:\d+\) reaches itself; so does lo \(127.0.0.1:\d+\), which leads to other machines"

    assert re.fullmatch(pattern, machine.CHECKS["network"](""))


def test_reports_a_missing_default_route(monkeypatch):
    def unreachable(host):
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr("rlcore.controller.network.address_toward", unreachable)

    assert "no default route: to join other machines, ray start needs --node-ip-address" in machine.CHECKS["network"](
        ""
    )


def test_reports_unwritable_temporary_files(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)

    with pytest.raises(machine.Fault, match=r"no temporary file can be written: .*No space left") as caught:
        machine.CHECKS["temporary files"]("")
    assert caught.value.fix == "export TMPDIR=DIR"


def test_works_without_ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "rlcore.controller.ray_runtime", raising=False)

    with pytest.raises(
        machine.Remark, match="runtime=ray needs Ray, which is not installed; only runtime=local"
    ) as caught:
        machine.CHECKS["ray start"]("")
    assert caught.value.fix == "pip install ray"
