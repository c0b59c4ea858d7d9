"""Run a Python program that nobody trusts: a process without network, with limits, that ends with all its children.

Used by python.py, and a program itself:  python -I -S sandbox.py '{"program": "p.py", "wall_s": 5, …}'

The launcher (this file) and the program are a process group of their own. The program cannot leave it, nor open a socket,
nor signal or trace another process: a seccomp filter refuses those calls, for its children too. At the end, in time or
not, and when its parent dies, the launcher ends the whole group. Linux on x86-64 and ARM64.

This keeps a model's mistakes from a machine; it is no prison. The program reads what the user may read.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys
import time
from typing import Any

_NEW_PRIVILEGES, _SECCOMP, _PARENT_DEATH = 38, 22, 1
_FILTER = 2
_ARCHITECTURES: dict[str, tuple[int, dict[str, int]]] = {
    "x86_64": (
        0xC000003E,
        {
            "socket": 41, "connect": 42, "kill": 62, "ptrace": 101, "setpgid": 109, "setsid": 112, "tkill": 200,
            "process_vm_writev": 311, "pidfd_send_signal": 424, "io_uring_setup": 425, "pidfd_getfd": 438,
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            "ptrace": 117, "kill": 129, "tkill": 130, "setpgid": 154, "setsid": 157, "socket": 198, "connect": 203,
            "process_vm_writev": 271, "pidfd_send_signal": 424, "io_uring_setup": 425, "pidfd_getfd": 438,
        },
    ),
}  # fmt: skip
"""Machine -> (its number in audit.h, system calls that are refused)."""
_X32 = 0x40000000


def supported() -> str:
    """Why this machine cannot run programs in this way; empty when it can."""
    if sys.platform != "linux":
        return f"it needs Linux, and this is {sys.platform}"
    if platform.machine() not in _ARCHITECTURES:
        return f"it needs one of {', '.join(_ARCHITECTURES)}, and this is {platform.machine()}"
    return ""


def filter_program(machine: str) -> bytes:
    """The seccomp filter as BPF: the refused calls, and those of other architectures, give EPERM."""
    number, calls = _ARCHITECTURES[machine]
    refuse, allow = 0x00050000 | 1, 0x7FFF0000  # SECCOMP_RET_ERRNO | EPERM, SECCOMP_RET_ALLOW
    load, equal, above, back = 0x20, 0x15, 0x35, 0x06  # of a word; jump if ==, if >=; return
    tests = [(equal, call) for call in sorted(calls.values())] + [(above, _X32)]
    steps = [(load, 0, 0, 4), (equal, 1, 0, number), (back, 0, 0, refuse), (load, 0, 0, 0)]
    steps += [(code, len(tests) - i, 0, value) for i, (code, value) in enumerate(tests)]
    steps += [(back, 0, 0, allow), (back, 0, 0, refuse)]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def main(text: str) -> None:
    """Run a program; writes one JSON line about its end to stdout, which the program does not have."""
    spec: dict[str, Any] = json.loads(text)
    libc = ctypes.CDLL(None, use_errno=True)
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    libc.prctl(_PARENT_DEATH, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != spec["parent"]:
        return
    start = time.monotonic()
    told, tell = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        _become(spec, libc, tell)
    os.close(tell)
    status, late = None, False
    while status is None:
        found, state = os.waitpid(child, os.WNOHANG)
        if found:
            status = os.waitstatus_to_exitcode(state)
        elif time.monotonic() - start > spec["wall_s"]:
            late, status = True, -signal.SIGKILL
        else:
            time.sleep(0.002)
    failed = "" if late else os.read(told, 1000).decode(errors="replace")
    os.write(1, json.dumps({"status": status, "late": late, "failed": failed}).encode())
    os.killpg(0, signal.SIGKILL)


def _become(spec: dict[str, Any], libc: ctypes.CDLL, tell: int) -> None:
    """In the child: limits, filter, and then the program. Never returns; what fails before the program is told."""
    try:
        for source, place in ((spec["input"], 0), (spec["output"], 1), (os.open(os.devnull, os.O_WRONLY), 2)):
            os.dup2(source, place)
            os.close(source)
        limits = {
            resource.RLIMIT_CPU: spec["cpu_s"],
            resource.RLIMIT_AS: spec["memory_bytes"],
            resource.RLIMIT_FSIZE: spec["file_bytes"],
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_NOFILE: 256,
        }
        for limit, most in limits.items():
            resource.setrlimit(limit, (most, most))
        code = filter_program(platform.machine())
        held = ctypes.create_string_buffer(code, len(code))
        program = struct.pack("@HP", len(code) // 8, ctypes.addressof(held))
        if libc.prctl(_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.prctl(_SECCOMP, _FILTER, program, 0, 0):
            raise OSError(ctypes.get_errno(), "the kernel takes no seccomp filter")
        os.execve(sys.executable, [sys.executable, "-I", spec["program"]], spec["variables"])
    except BaseException as error:
        os.write(tell, f"{type(error).__name__}: {error}".encode())
        os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
