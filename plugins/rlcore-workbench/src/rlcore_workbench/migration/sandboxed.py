"""Child process of sandbox.py, in namespaces of its own: build a root directory, then run a script in it.

It imports only the standard library, and prints exit code, records and the end of stderr as JSON.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

_LIBRARIES = tuple(f"{parent}lib{kind}" for parent in ("usr/", "") for kind in ("", "32", "64", "x32"))
_FILES = ("etc/group", "etc/ld.so.cache", "etc/localtime", "etc/passwd")
_DEVICES = ("null", "zero", "urandom")
_PROGRAMS = (
    "awk basename bash cat chmod cp cut date dirname egrep env expr false find grep head hostname id ln ls mkdir mktemp"
    " mv nohup nproc paste pwd readlink realpath rm rmdir sed seq sh sort stat tail tee test timeout touch tr true uname"
    " uniq wc which whoami xargs"
)
"""Programs that run, at /usr/bin; every other program on the caller's PATH is a stub at its place."""
_STUBS = "python python3 torchrun accelerate deepspeed ray uv trl"
"""Further stubs at /usr/bin, because scripts start them through another program, such as nohup or env."""
_RECORD = r"""local part=/.sandbox/part$BASHPID
    printf '%s\0' "$line" "$@" $'\1' > "$part"
    /usr/bin/cat "$part" >> /.sandbox/record"""
"""One write for each record, since a script may start several programs at once."""
_STUB = f'#!/bin/bash\nrecord() {{ local line=0; {_RECORD}; }}\nrecord "${{0##*/}}" "$@"\n'
_START = f"command_not_found_handle() {{ local line=${{BASH_LINENO[0]:-0}}; {_RECORD}; }}\nsleep() {{ :; }}\n"
"""Read by every bash before its script."""
_MAX_PROCESSES = 256
_BIND, _RECURSIVE, _NOEXEC, _NODEV, _NOSUID, _READ_ONLY = 4096, 16384, 8, 4, 2, 1
_MOUNT_SETATTR, _AT_RECURSIVE = 442, 0x8000
_DROP_FROM_BOUNDING_SET, _NO_NEW_PRIVILEGES = 24, 38
_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: object) -> None:
    if result:
        raise OSError(ctypes.get_errno(), f"{os.strerror(ctypes.get_errno())}: {what}")


def _mount(source: str, target: Path, kind: str | None = None, flags: int = 0, data: str | None = None) -> None:
    encoded = [None if it is None else os.fsencode(it) for it in (source, target, kind, data)]
    _checked(_libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3]), target)


def _bind(source: str, target: Path, flags: int = 0) -> None:
    """Show a directory or file, with everything mounted below it, read-only."""
    _mount(source, target, flags=_BIND | _RECURSIVE)
    attributes = (ctypes.c_uint64 * 4)(_READ_ONLY | flags, 0, 0, 0)
    path = os.fsencode(target)
    _checked(_libc.syscall(_MOUNT_SETATTR, -100, path, _AT_RECURSIVE, ctypes.byref(attributes), 32), target)


def _build(root: Path, shown: list[str]) -> None:
    """Fill the root: libraries, permitted programs and `shown` read-only, a few devices; the rest is memory."""
    _mount("tmpfs", root, "tmpfs", _NODEV | _NOSUID, "size=64m,mode=755")
    for name in ("proc", "dev", "etc", "tmp", "usr/bin", ".sandbox", "." + os.environ.get("HOME", "/root")):
        (root / name).mkdir(parents=True, exist_ok=True)
    for name in ("bin", "sbin", "usr/sbin"):
        (root / name).symlink_to("usr/bin" if "/" not in name else "bin")
    for name in _LIBRARIES:
        source = Path("/", name)
        if source.is_symlink():
            (root / name).symlink_to(os.readlink(source))
        elif source.is_dir():
            (root / name).mkdir()
            _bind(str(source), root / name)
    for name in _PROGRAMS.split():
        places = [Path(folder, name) for folder in ("/usr/bin", "/bin") if Path(folder, name).exists()]
        if places:
            _bind_file(places[0], root / "usr/bin" / name)
    for name in _FILES:
        if Path("/", name).exists():
            _bind_file(Path("/", name), root / name)
    try:
        _mount("proc", root / "proc", "proc", _READ_ONLY | _NOSUID | _NODEV | _NOEXEC)
    except OSError:  # some of it is hidden from this container
        _bind("/proc", root / "proc")
    for name in _DEVICES:
        (root / "dev" / name).touch()
        _mount(f"/dev/{name}", root / "dev" / name, flags=_BIND)
    (root / "dev/fd").symlink_to("/proc/self/fd")
    for directory in shown:
        target = root / directory.lstrip("/")
        if not target.is_dir() or not any(target.iterdir()):
            target.mkdir(parents=True, exist_ok=True)
            _show(directory, target, root / ".sandbox" / f"layer{len(list((root / '.sandbox').iterdir()))}")
    (root / ".sandbox/stub").write_text(_STUB)
    (root / ".sandbox/stub").chmod(0o755)
    (root / ".sandbox/start").write_text(_START)
    (root / ".sandbox/record").touch()


def _bind_file(source: Path, target: Path) -> None:
    target.touch()
    _bind(str(source.resolve()), target)


def _show(source: str, target: Path, layer: Path) -> None:
    """Show a directory; what the script writes there stays in memory, or fails where the kernel has no overlay."""
    upper, work = layer / "upper", layer / "work"
    upper.mkdir(parents=True)
    work.mkdir()
    options = f"lowerdir={source},upperdir={upper},workdir={work}"
    try:
        _mount("overlay", target, "overlay", _NOEXEC | _NODEV | _NOSUID, options)
    except OSError:
        _bind(source, target, _NOEXEC)


def _add_stubs(programs: dict[str, list[str]]) -> None:
    """Replace the programs of each folder, in the new root, where links cannot lead out of it."""
    for folder, names in programs.items():
        os.makedirs(folder, exist_ok=True)
        if os.path.realpath(folder) != "/usr/bin" and os.listdir(folder):
            _mount("tmpfs", Path(folder), "tmpfs", _NODEV | _NOSUID, "size=1m,mode=755")
        for name in names:
            if not os.path.lexists(os.path.join(folder, name)):
                os.symlink("/.sandbox/stub", os.path.join(folder, name))


def _programs() -> dict[str, list[str]]:
    """Return folder -> names in it, for the caller's PATH and the directory of this interpreter."""
    places = [*os.environ.get("PATH", "").split(":"), os.path.dirname(sys.executable)]
    folders = [it for it in dict.fromkeys(places) if it.startswith("/") and os.path.isdir(it)]
    return {"/usr/bin": _STUBS.split()} | {
        it: [*os.listdir(it), *(_STUBS.split() if it == "/usr/bin" else ())] for it in folders
    }


def _restrict(user: int) -> None:
    """Give up every capability, for this process and all that it starts, and limit what it may use."""
    for capability in range(64):
        _libc.prctl(_DROP_FROM_BOUNDING_SET, capability, 0, 0, 0)
    if user:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    _checked(_libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "no_new_privs")
    resource.setrlimit(resource.RLIMIT_NPROC, (_MAX_PROCESSES, _MAX_PROCESSES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 24, 1 << 24))
    resource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _wait(child: int, limit_s: float) -> tuple[int | None, bool]:
    """Wait for all processes, as the first one of the namespace; return the child's exit code, and if all ended."""
    code, end = None, time.monotonic() + limit_s
    while time.monotonic() < end:
        try:
            ended, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code, True
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
        elif not ended:
            time.sleep(0.01)
    return code, False


def main(root: Path, limit_s: float, user: int, script: str, arguments: list[str]) -> None:
    """Run the script as `user`, 0 for the one that this process has, and print its result; `code` is null if it
    reached the limit."""
    directory = os.getcwd()
    shown = [it for it in dict.fromkeys([directory, os.path.dirname(script)]) if it != "/"]
    programs = _programs()
    _build(root, sorted(shown))
    os.chroot(root)
    os.chdir(directory)
    _add_stubs(programs)
    if user:
        for place in ("/tmp", "/.sandbox", "/.sandbox/record", os.environ.get("HOME", "/root"), *shown, script):
            with contextlib.suppress(OSError):  # read-only, where the kernel has no overlay
                os.chown(place, user, user)
    environment = {**os.environ, "PATH": "/usr/bin", "BASH_ENV": "/.sandbox/start"}
    with open("/.sandbox/stderr", "wb") as errors:
        child = subprocess.Popen(
            ["/bin/bash", script, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: _restrict(user),
        )
        code, ended = _wait(child.pid, limit_s)
    texts = [Path("/.sandbox", name).read_text("utf-8", "replace") for name in ("record", "stderr")]
    result = {"code": code, "ended": ended, "record": texts[0], "stderr": texts[1][-2000:]}
    print(json.dumps(result), flush=True)
    os._exit(0)  # ends what is left; `child` was waited for above


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:])
