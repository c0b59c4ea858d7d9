"""Run a launch script in a sandbox, and record the commands that it would start.

The script runs in namespaces of its own (mounts, network, processes, and users, or as nobody if root runs it), without
capabilities, and with a time limit. It sees libraries, a few programs such as cat and sed, its own and the current
directory, and a read-only /proc; what it writes is in memory and lost. All other programs on PATH, and those beside
the interpreter that runs rlcore, are stubs that record their arguments and succeed; files in the shown directories
cannot be started, only read by bash.

Limited are time, size of files, processes, and the memory of each process; not limited are processor time and the sum
of memory. The environment is passed on. A script could start programs that it writes itself, or that lie among the
libraries: they are confined in the same way.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlcore.errors import ConfigError
from rlcore_workbench.migration import sandboxed
from rlcore_workbench.migration.shell import Command
from rlcore_workbench.migration.words import Word, literal

LIMIT_S = 20.0
START_S = 30.0
"""Further time for the sandbox itself."""
_NOBODY = 65534


def namespaces() -> list[str]:
    """Return the arguments of unshare. Root needs no namespace for users: the script then runs as nobody."""
    users = ["--user", "--map-root-user"] if os.geteuid() else []
    return [*users, "--mount", "--net", "--pid", "--ipc", "--uts", "--fork"]


def execute(script: Path, arguments: Sequence[str] = (), limit_s: float = LIMIT_S) -> tuple[list[Command], list[str]]:
    """Return the commands that the script starts, in order, and remarks about its run.

    Raises:
        ConfigError: this machine cannot isolate the script, or it does not end.
    """
    unshare = shutil.which("unshare")
    if sys.platform != "linux" or unshare is None:
        raise _refused("it needs Linux and the program unshare of util-linux")
    with tempfile.TemporaryDirectory() as root:
        own = [root, str(limit_s), str(0 if os.geteuid() else _NOBODY), str(script.resolve())]
        process = subprocess.Popen(
            [unshare, *namespaces(), "--kill-child", sys.executable, "-I", sandboxed.__file__, *own, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        with process:
            try:
                out, errors = process.communicate(timeout=limit_s + START_S)
            except subprocess.TimeoutExpired:
                raise _refused("its processes did not start or end in time") from None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise _refused(errors.decode(errors="replace").strip().rpartition("\n")[2])
    return _commands(script, json.loads(out), limit_s)


def _commands(script: Path, result: dict[str, Any], limit_s: float) -> tuple[list[Command], list[str]]:
    if result["code"] is None:
        raise ConfigError(
            f"{script} did not end within {limit_s:g} s in the sandbox\n"
            "Shorten its loops or waits, or type the command without --execute, which reads the script."
        )
    commands = []
    for record in result["record"].split("\0\1\0")[:-1]:
        line, *words = record.split("\0")
        commands.append(Command(tuple(Word(word, literal(word)) for word in words), int(line)))
    remarks = [f"executed in a sandbox, with {len(commands)} programs replaced by stubs without output"]
    if result["code"]:
        last = result["stderr"].strip().rpartition("\n")[2]
        remarks.append(f"the script ended with exit code {result['code']}: {last}")
    if not result["ended"]:
        remarks.append(f"processes in the background were stopped after {limit_s:g} s")
    if not commands:
        raise ConfigError("\n".join([f"{script} started no program in the sandbox", *remarks[1:]]))
    return commands, remarks


def _refused(reason: str) -> ConfigError:
    return ConfigError(
        f"--execute: this machine cannot isolate the script: {reason}\n"
        f"Type the command without --execute, which reads the script and runs nothing (user {os.getuid()})."
    )
