"""Run a Python program that nobody trusts: a process without network, with limits, that ends with all its children.

Used by python.py, and a program itself:  python -I -S sandbox.py '{"program": "p.py", "wall_s": 5, …}'

The launcher (this file) and the program are a process group of their own. The program cannot leave it, nor open a socket,
nor signal or trace another process or change its limits: a seccomp filter refuses those calls, for its children too. At
the end, in time or not, when its parent dies, and when its processes are too many or hold too much memory together (looked
at every 20 ms), the launcher ends the whole group. Linux on x86-64 and ARM64.

Files: Landlock (Linux 5.13) lets it create, write and remove only in its working directory. Where the kernel has none,
it may do to files what the user may. Either way it reads what the user may read, and changes modes and times.

This keeps a model's mistakes from a machine; it is no prison.
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
"""Machine -> (its number in audit.h, system calls that are refused, prlimit64, refused for other processes)."""
_RULESET, _RULE, _RESTRICT = 444, 445, 446
"""Landlock's system calls, the same everywhere."""
_WRITE, _CHANGE_DIRECTORIES = 1 << 1, sum(1 << bit for bit in range(4, 13))
"""Landlock's rights: of files; to remove and to make directories, files, pipes, devices and links."""
_REFER, _TRUNCATE = 1 << 13, 1 << 14
"""Since its versions 2 and 3."""
_LOOK_S = 0.02
_X32 = 0x40000000


def supported() -> str:
    """Why this machine cannot run programs in this way; empty when it can."""
    if sys.platform != "linux":
        return f"it needs Linux, and this is {sys.platform}"
    if platform.machine() not in _ARCHITECTURES:
        return f"it needs one of {', '.join(_ARCHITECTURES)}, and this is {platform.machine()}"
    return ""


def lacks() -> list[str]:
    """What this machine cannot keep programs from, where they can run."""
    found = []
    if landlock(ctypes.CDLL(None)) < 1:
        found.append("Landlock (Linux 5.13): programs write and remove what you may")
    if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        found.append("/proc/PID/task/TID/children: nobody counts their processes and the memory of all of them")
    return found


def filter_program(machine: str) -> bytes:
    """The seccomp filter as BPF: the refused calls, and those of other architectures, give EPERM."""
    number, calls, limits = _ARCHITECTURES[machine]
    refuse, allow = 0x00050000 | 1, 0x7FFF0000  # SECCOMP_RET_ERRNO | EPERM, SECCOMP_RET_ALLOW
    load, equal, above, back = 0x20, 0x15, 0x35, 0x06  # of a word; jump if ==, if >=; return
    tests = [(equal, call) for call in sorted(calls.values())] + [(above, _X32)]
    steps = [(load, 0, 0, 4), (equal, 1, 0, number), (back, 0, 0, refuse), (load, 0, 0, 0)]
    steps += [(code, len(tests) - i + 3, 0, value) for i, (code, value) in enumerate(tests)]
    steps += [(equal, 0, 2, limits), (load, 0, 0, 16), (equal, 0, 1, 0)]  # the lower half of the first argument, a pid
    steps += [(back, 0, 0, allow), (back, 0, 0, refuse)]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def main(text: str) -> None:
    """Run a program; writes one JSON line about its end to stdout, which the program does not have."""
    spec: dict[str, Any] = json.loads(text)
    libc = ctypes.CDLL(None, use_errno=True)
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    libc.prctl(_PARENT_DEATH, signal.SIGTERM, 0, 0, 0)
    libc.prctl(_REAPER, 1, 0, 0, 0)  # whose parent ends becomes a child of this process
    if os.getppid() != spec["parent"]:
        return
    start = time.monotonic()
    told, tell = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        _become(spec, libc, tell)
    os.close(tell)
    status, late, over, look = None, False, False, start
    while status is None:
        found, state = os.waitpid(-1, os.WNOHANG)
        now = time.monotonic()
        if found == child:
            status = os.waitstatus_to_exitcode(state)
        elif now - start > spec["wall_s"]:
            late, status = True, -signal.SIGKILL
        elif now >= look:
            over = too_many(spec["processes"], spec["memory_bytes"])
            status, look = -signal.SIGKILL if over else None, now + _LOOK_S
        elif not found:
            time.sleep(0.002)
    failed = "" if late or over else os.read(told, 1000).decode(errors="replace")
    os.write(1, json.dumps({"status": status, "late": late, "over": over, "failed": failed}).encode())
    os.killpg(0, signal.SIGKILL)


def too_many(processes: int, memory_bytes: int) -> bool:
    """Whether there are more processes below this one, or more memory is resident in them together."""
    found, size, left = 0, 0, [os.getpid()]
    while left:
        pid = left.pop()
        try:
            threads = os.listdir(f"/proc/{pid}/task")
            children = [_words(f"/proc/{pid}/task/{it}/children") for it in threads]
            if pid != os.getpid():
                found += 1
                size += int(_words(f"/proc/{pid}/statm")[1]) * resource.getpagesize()
        except OSError:  # it has ended meanwhile
            continue
        left += [int(child) for each in children for child in each]
        if found > processes or size > memory_bytes:
            return True
    return False


def _words(path: str) -> list[str]:
    with open(path) as file:
        return file.read().split()


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
        if libc.prctl(_NEW_PRIVILEGES, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "the kernel does not withhold privileges")
        confine(libc)
        code = filter_program(platform.machine())
        held = ctypes.create_string_buffer(code, len(code))
        program = struct.pack("@HP", len(code) // 8, ctypes.addressof(held))
        if libc.prctl(_SECCOMP, _FILTER, program, 0, 0):
            raise OSError(ctypes.get_errno(), "the kernel takes no seccomp filter")
        os.execve(sys.executable, [sys.executable, "-I", spec["program"]], spec["variables"])
    except BaseException as error:
        os.write(tell, f"{type(error).__name__}: {error}".encode())
        os._exit(1)


def landlock(libc: ctypes.CDLL) -> int:
    """The version of Landlock that the kernel has; less than 1 for none."""
    return int(libc.syscall(_RULESET, None, ctypes.c_size_t(0), 1))


def confine(libc: ctypes.CDLL) -> None:
    """From now on this process, and those that it starts, change files in the working directory alone."""
    version = landlock(libc)
    if version < 1:
        return
    of_files = _WRITE | (_TRUNCATE if version >= 3 else 0)
    rights = of_files | _CHANGE_DIRECTORIES | (_REFER if version >= 2 else 0)
    rules = libc.syscall(_RULESET, struct.pack("@Q", rights), ctypes.c_size_t(8), 0)
    for path, allowed in ((".", rights), (os.devnull, of_files)):
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        if rules < 0 or libc.syscall(_RULE, rules, 1, struct.pack("=Qi", allowed, place), 0):
            raise OSError(ctypes.get_errno(), "the kernel takes no rules for files")
        os.close(place)
    if libc.syscall(_RESTRICT, rules, 0):
        raise OSError(ctypes.get_errno(), "the kernel takes no rules for files")
    os.close(rules)


if __name__ == "__main__":
    main(sys.argv[1])
