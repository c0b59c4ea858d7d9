"""Checks of this machine. Each returns its result, or raises a `Remark` or a `Fault` with the line to type.

Called by isolated.py in a separate process, which a hanging driver cannot block.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlcore.errors import ConfigError
from rlcore.registry.versions import requirements

_GIB = 2**30


class Remark(Exception):
    """Something that works, but not well, with the line to type."""

    status = "warning"

    def __init__(self, detail: str, fix: str = "") -> None:
        super().__init__(detail)
        self.fix = fix


class Fault(Remark):
    """Something that does not work."""

    status = "broken"


def _requirements() -> dict[str, Any]:
    """Return package -> version specifier from rlcore's own metadata."""
    return {it.name: it.specifier for it in requirements("rlcore")}


def _version(package: str) -> str:
    """Return the installed version of a package; raise a Fault if rlcore does not support it."""
    import importlib_metadata as metadata

    wanted = _requirements().get(package, "")
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise Fault("is not installed", f"pip install '{package}{wanted}'") from None
    if wanted and not wanted.contains(found, prereleases=True):
        raise Fault(f"{found}, but rlcore needs {wanted}", f"pip install '{package}{wanted}'")
    return str(found)


def _python(_: str) -> str:
    import importlib_metadata as metadata
    from packaging.specifiers import SpecifierSet

    wanted = metadata.metadata("rlcore")["Requires-Python"]
    found = platform.python_version()
    if not SpecifierSet(wanted).contains(found, prereleases=True):
        raise Fault(f"{found}, but rlcore needs {wanted}", "python3.11 -m venv .venv")
    return f"{found} ({sys.executable})"


def _other_requirements(_: str) -> str:
    others = sorted(set(_requirements()) - {"torch", "ray", "transformers"})
    return ", ".join(f"{package} {_version(package)}" for package in others)


def _ray(_: str) -> str:
    try:
        return _version("ray")
    except Fault as fault:
        raise Remark(f"{fault}; only runtime=local works", fault.fix) from None


def _devices(_: str) -> str:
    """Check each GPU by multiplying two matrices."""
    import torch

    if not torch.cuda.is_available():
        return f"no GPU; {torch.get_num_threads()} threads on the CPU"
    for index in range(torch.cuda.device_count()):
        try:
            ones = torch.ones(64, 64, device=f"cuda:{index}")
            found = float((ones @ ones).sum())
        except RuntimeError as error:
            raise Fault(f"cuda:{index} does not work: {error}", f"nvidia-smi -i {index}") from error
        if found != 64**3:
            raise Fault(f"cuda:{index} computes {found} instead of {64**3}", f"nvidia-smi -i {index} -q -d ECC")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return f"{', '.join(names)}; CUDA {torch.version.cuda}"


def _disk(output: str) -> str:
    """Check that the directory of runs has space for checkpoints."""
    from rlcore.api.run import is_writable

    folder = Path(output).absolute()
    if not is_writable(folder):
        raise Fault(f"{folder} cannot be written", "rlcore train run.directory=DIR ...")
    present = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(present).free / _GIB
    text = f"{free:.1f} GiB free for {folder}"
    if free < 1:
        raise Fault(text, "rlcore train run.directory=DIR ...")
    if free < 10:
        raise Remark(f"{text}; checkpoints of a large model need more", "rlcore train run.directory=DIR ...")
    return text


def _shared_memory(_: str) -> str:
    """Check the space in /dev/shm for Ray's object store and collectives."""
    if not Path("/dev/shm").is_dir():
        return "this system has no /dev/shm"
    free = shutil.disk_usage("/dev/shm").free / _GIB
    if free < 1:
        raise Remark(f"{free:.2f} GiB free in /dev/shm; batches spill to disk", "docker run --shm-size=8g ...")
    return f"{free:.1f} GiB free in /dev/shm"


def _temporary(_: str) -> str:
    """Check the space for temporary files, which Ray's sockets and sessions and the doctor itself need."""
    import tempfile

    try:
        with tempfile.TemporaryFile() as file:
            file.write(bytes(2**20))
            file.flush()
    except OSError as error:
        raise Fault(f"no temporary file can be written: {error}", "export TMPDIR=DIR") from error
    free = shutil.disk_usage(tempfile.gettempdir()).free / _GIB
    if free < 1:
        raise Remark(f"{free:.2f} GiB free for {tempfile.gettempdir()}; Ray needs more", "export TMPDIR=DIR")
    return f"{free:.1f} GiB free for {tempfile.gettempdir()}"


def _network(_: str) -> str:
    """Check the interface of a local Ray cluster, and the one for clusters of several machines."""
    from rlcore.controller.network import address_of, address_toward, interface_of

    names = [name for _, name in socket.if_nameindex()]
    chosen = os.environ.get("GLOO_SOCKET_IFNAME") or next(name for name in names if name.startswith("lo"))
    if chosen not in names:
        raise Fault(f"GLOO_SOCKET_IFNAME={chosen} does not exist, only {', '.join(names)}", "unset GLOO_SOCKET_IFNAME")
    if sys.platform != "linux":
        return f"{chosen}; pools on several machines need Linux"
    try:
        text = f"{chosen} ({_reached(address_of(chosen) or 'no address')}) reaches itself"
    except OSError as error:
        raise Fault(f"{chosen} cannot reach itself: {error}", "export GLOO_SOCKET_IFNAME=lo") from error
    try:
        outer = address_toward("192.0.2.1")  # a reserved address, to find the default route like Ray
    except OSError:
        return f"{text}; no default route: to join other machines, ray start needs --node-ip-address=ADDRESS"
    try:
        return f"{text}; so does {interface_of(outer)} ({_reached(outer)}), which leads to other machines"
    except OSError as error:
        raise Remark(f"{text}; {outer} cannot: {error}", "ray start --node-ip-address=ADDRESS ...") from error


def _reached(address: str) -> str:
    """Connect to a free port of this address and return address:port."""
    with socket.create_server((address, 0)) as server:
        port = server.getsockname()[1]
        socket.create_connection((address, port), timeout=5).close()
    return f"{address}:{port}"


def _ray_start(_: str) -> str:
    """Start a one-host local Ray cluster, as a run would."""
    from rlcore.controller.make import make_runtime
    from rlcore.controller.pool import PoolConfig, RuntimeConfig, available_cores

    try:
        runtime = make_runtime(RuntimeConfig())
    except ConfigError as error:
        raise Remark(f"{error}".partition("\n")[0] + "; only runtime=local works", "pip install ray") from error
    began = time.monotonic()
    try:
        runtime.start({"main": PoolConfig(device="cpu")}, {})
        runtime.wait([runtime.submit("main", 0, "free_port")], "the first call", 60.0)
    finally:
        runtime.shutdown()
    cores = f"{available_cores()} of {os.cpu_count()} cores, limited by affinity and cgroup"
    return f"a host responds after {time.monotonic() - began:.1f} s; {cores}"


def _threads(_: str) -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    words = os.environ.get("OMP_NUM_THREADS", "")
    if not words:
        raise Remark(f"OMP_NUM_THREADS is not set: each process starts {cores} threads", "export OMP_NUM_THREADS=1")
    if not words.isdigit() or int(words) > cores:
        raise Remark(f"OMP_NUM_THREADS={words}, but there are {cores} cores", f"export OMP_NUM_THREADS={cores}")
    return f"OMP_NUM_THREADS={words} of {cores} cores"


CHECKS: dict[str, Callable[[str], str]] = {
    "python": _python,
    "torch": lambda _: _version("torch"),
    "ray": _ray,
    "transformers": lambda _: _version("transformers"),
    "requirements": _other_requirements,
    "devices": _devices,
    "disk": _disk,
    "temporary files": _temporary,
    "shared memory": _shared_memory,
    "threads": _threads,
    "network": _network,
    "ray start": _ray_start,
}
