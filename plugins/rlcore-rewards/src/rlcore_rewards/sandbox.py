"""Execution of a Python program without network, with resource limits, and with clean-up of its children.

Used by python.py, which runs this file as  python -I -S sandbox.py '{"program": "p.py", "wall_s": 5, …}'

The launcher (this file) and the program form a process group. The program cannot leave it, open a socket, or
signal, trace or change the limits of another process: a seccomp filter refuses those calls, also for its
children. The launcher kills the whole group when the program ends, runs out of time, or exceeds its limits of
processes and memory (checked every 20 ms), and when the launcher's parent dies. Requires Linux on x86-64 or
ARM64.

Files: with Landlock (Linux 5.13), the program can create, write and remove files only in its working
directory. Without it, the program can change all files that the user can. Either way it can read all files
that the user can, and change file modes and times.

This protects a machine from a model's mistakes; it is not a security boundary.
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
_REAPER = 36
_FILTER = 2
_ARCHITECTURES: dict[str, tuple[int, dict[str, int], int]] = {
    "x86_64": (
        0xC000003E,
        {
            "socket": 41, "connect": 42, "kill": 62, "ptrace": 101, "setpgid": 109, "setsid": 112, "tkill": 200,
            "process_vm_writev": 311, "pidfd_send_signal": 424, "io_uring_setup": 425, "pidfd_getfd": 438,
            "rt_sigqueueinfo": 129, "tgkill": 234, "rt_tgsigqueueinfo": 297,
        },
        302,
    ),
    "aarch64": (
        0xC00000B7,
        {
            "ptrace": 117, "kill": 129, "tkill": 130, "setpgid": 154, "setsid": 157, "socket": 198, "connect": 203,
            "process_vm_writev": 271, "pidfd_send_signal": 424, "io_uring_setup": 425, "pidfd_getfd": 438,
            "tgkill": 131, "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240,
        },
        261,
    ),
}  # fmt: skip
"""Machine -> (its number in audit.h, refused system calls, number of prlimit64, refused for other processes)."""
_RULESET, _RULE, _RESTRICT = 444, 445, 446
"""Landlock's system calls, with the same numbers on all architectures."""
_WRITE, _CHANGE_DIRECTORIES = 1 << 1, sum(1 << bit for bit in range(4, 13))
"""Landlock's rights to write files, and to remove and create directories, files, pipes, devices and links."""
_REFER, _TRUNCATE = 1 << 13, 1 << 14
"""Landlock's rights since its versions 2 and 3."""
_POLL_S = 0.02
_X32 = 0x40000000


def supported() -> str:
    """Return why this machine cannot run the sandbox, or an empty string if it can."""
    if sys.platform != "linux":
        return f"it needs Linux, and this is {sys.platform}"
    if platform.machine() not in _ARCHITECTURES:
        return f"it needs one of {', '.join(_ARCHITECTURES)}, and this is {platform.machine()}"
    return ""


def missing() -> list[str]:
    """Return the optional kernel features that this machine lacks, each with the consequence."""
    found = []
    if landlock(ctypes.CDLL(None)) < 1:
        found.append("Landlock (Linux 5.13): programs can write and remove all files that you can")
    if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        found.append("/proc/PID/task/TID/children: the limits of processes and total memory are not enforced")
    return found


def filter_program(machine: str) -> bytes:
    """Return the seccomp filter as BPF: refused calls, and calls of other architectures, fail with EPERM."""
    number, calls, limits = _ARCHITECTURES[machine]
    refuse, allow = 0x00050000 | 1, 0x7FFF0000  # SECCOMP_RET_ERRNO | EPERM, SECCOMP_RET_ALLOW
    load, equal, above, back = 0x20, 0x15, 0x35, 0x06  # load a word; jump if ==; jump if >=; return
    tests = [(equal, call) for call in sorted(calls.values())] + [(above, _X32)]
    steps = [(load, 0, 0, 4), (equal, 1, 0, number), (back, 0, 0, refuse), (load, 0, 0, 0)]
    steps += [(code, len(tests) - i + 3, 0, value) for i, (code, value) in enumerate(tests)]
    steps += [(equal, 0, 2, limits), (load, 0, 0, 16), (equal, 0, 1, 0)]  # the lower half of the first argument, a pid
    steps += [(back, 0, 0, allow), (back, 0, 0, refuse)]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def main(text: str) -> None:
    """Run a program, and write its outcome as one JSON line to stdout, which the program does not share."""
    spec: dict[str, Any] = json.loads(text)
    libc = ctypes.CDLL(None, use_errno=True)
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    libc.prctl(_PARENT_DEATH, signal.SIGTERM, 0, 0, 0)
    libc.prctl(_REAPER, 1, 0, 0, 0)  # orphaned processes become children of this process
    if os.getppid() != spec["parent"]:
        return
    start = time.monotonic()
    errors, report = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        _become(spec, libc, report)
    os.close(report)
    status, late, over, next_check = None, False, False, start
    while status is None:
        found, state = os.waitpid(-1, os.WNOHANG)
        now = time.monotonic()
        if found == child:
            status = os.waitstatus_to_exitcode(state)
        elif now - start > spec["wall_s"]:
            late, status = True, -signal.SIGKILL
        elif now >= next_check:
            over = too_many(spec["processes"], spec["memory_bytes"])
            status, next_check = -signal.SIGKILL if over else None, now + _POLL_S
        elif not found:
            time.sleep(0.002)
    failed = "" if late or over else os.read(errors, 1000).decode(errors="replace")
    os.write(1, json.dumps({"status": status, "late": late, "over": over, "failed": failed}).encode())
    os.killpg(0, signal.SIGKILL)


def too_many(processes: int, memory_bytes: int) -> bool:
    """Return True if the descendants of this process exceed the limits of processes or resident memory."""
    found, size, left = 0, 0, [os.getpid()]
    while left:
        pid = left.pop()
        try:
            threads = os.listdir(f"/proc/{pid}/task")
            children = [_words(f"/proc/{pid}/task/{it}/children") for it in threads]
            if pid != os.getpid():
                found += 1
                size += int(_words(f"/proc/{pid}/statm")[1]) * resource.getpagesize()
        except OSError:  # the process has ended in the meantime
            continue
        left += [int(child) for each in children for child in each]
        if found > processes or size > memory_bytes:
            return True
    return False


def _words(path: str) -> list[str]:
    with open(path) as file:
        return file.read().split()


def _become(spec: dict[str, Any], libc: ctypes.CDLL, report: int) -> None:
    """Set limits and filter in the child, and execute the program; report earlier errors to the launcher."""
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
        if libc.prctl(_NEW_PRIVILEGES, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "the kernel cannot set no_new_privs")
        confine(libc)
        code = filter_program(platform.machine())
        held = ctypes.create_string_buffer(code, len(code))
        program = struct.pack("@HP", len(code) // 8, ctypes.addressof(held))
        if libc.prctl(_SECCOMP, _FILTER, program, 0, 0):
            raise OSError(ctypes.get_errno(), "the kernel rejected the seccomp filter")
        os.execve(sys.executable, [sys.executable, "-I", spec["program"]], spec["variables"])
    except BaseException as error:
        os.write(report, f"{type(error).__name__}: {error}".encode())
        os._exit(1)


def landlock(libc: ctypes.CDLL) -> int:
    """Return the kernel's version of Landlock; less than 1 if it has none."""
    return int(libc.syscall(_RULESET, None, ctypes.c_size_t(0), 1))


def confine(libc: ctypes.CDLL) -> None:
    """Restrict this process and its children to changing files in the working directory."""
    version = landlock(libc)
    if version < 1:
        return
    of_files = _WRITE | (_TRUNCATE if version >= 3 else 0)
    rights = of_files | _CHANGE_DIRECTORIES | (_REFER if version >= 2 else 0)
    rules = libc.syscall(_RULESET, struct.pack("@Q", rights), ctypes.c_size_t(8), 0)
    for path, allowed in ((".", rights), (os.devnull, of_files)):
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        if rules < 0 or libc.syscall(_RULE, rules, 1, struct.pack("=Qi", allowed, place), 0):
            raise OSError(ctypes.get_errno(), "the kernel rejected the Landlock rules")
        os.close(place)
    if libc.syscall(_RESTRICT, rules, 0):
        raise OSError(ctypes.get_errno(), "the kernel rejected the Landlock rules")
    os.close(rules)


if __name__ == "__main__":
    main(sys.argv[1])
