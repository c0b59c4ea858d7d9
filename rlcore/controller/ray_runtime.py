"""The Ray runtime: hosts are Ray actors, one per device.

Ray starts and places the processes and transports data; the work of a host is in host.py. Replies are handled one by
one, so that a dead or failed rank ends a call at once, even if its peers are still waiting in a collective.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any, Literal

import ray
import ray.exceptions
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlcore.controller.future import Interrupt
from rlcore.controller.host import HostInfo, Reply
from rlcore.controller.pool import PoolConfig, RuntimeConfig, available_cores, check_capacity
from rlcore.controller.ray_host import RayHost
from rlcore.controller.ray_store import GET_TIMEOUT_S, RayStore
from rlcore.controller.ref import Store
from rlcore.controller.runtime import check_machine, resolve_device
from rlcore.errors import LOST_PEER, ConfigError, DeadlineExceeded, HostDied, InfrastructureError

logger = logging.getLogger(__name__)
_STACK_TIMEOUT_S = 5.0
_BESIDE = ("poll", "keep", "stack")
"""Actions that run while a host executes another call."""
_QUICK_S = 0.1
_INTERRUPT_S = 1.0
_PEER_S = 5.0
"""Ray reports a death after a second or two; a live rank may keep waiting for the failed one."""


class RayRuntime:
    """Runs hosts as Ray actors, with one placement group per pool."""

    inline = False

    def __init__(self, config: RuntimeConfig) -> None:
        self.config = config
        self.store: Store = RayStore()
        self._actors: dict[str, list[Any]] = {}
        self._devices: dict[str, Literal["cpu", "cuda"]] = {}
        self._groups: list[PlacementGroup] = []
        self._started_ray = False
        self._labels: dict[Any, tuple[str, int]] = {}

    def start(self, pools: Mapping[str, PoolConfig], env: Mapping[str, Sequence[Mapping[str, str]]]) -> None:
        if not ray.is_initialized():
            check_machine(self.config, pools)
        self._connect()
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        pools = {name: replace(pool, device=self._resolve(name, pool, nodes)) for name, pool in pools.items()}
        check_capacity(pools, nodes)
        for name, pool in pools.items():
            self._start_pool(name, pool, env.get(name, ()))
        for name, pool in pools.items():
            if pool.num_devices > 1:
                self._join(name)

    def _resolve(self, name: str, pool: PoolConfig, nodes: Sequence[Mapping[str, float]]) -> Literal["cpu", "cuda"]:
        """Return the device of a pool, which may differ from the devices of this machine."""
        device = resolve_device(pool.device)
        if pool.device == "auto" and not self._started_ray:
            num_nodes = sum(node.get("GPU", 0) > 0 for node in nodes)
            device = "cuda" if num_nodes else "cpu"
            text = "pools.%s.device=auto is %s: %d of %d nodes of the cluster have GPUs"
            logger.warning(text, name, device, num_nodes, len(nodes))
        self._devices[name] = device
        return device

    def device(self, pool: str) -> Literal["cpu", "cuda"]:
        return self._devices[pool]

    def pool_size(self, pool: str) -> int:
        return len(self._actors[pool])

    def address(self, pool: str) -> str:
        handle = self._actors[pool][0].address.remote()
        return str(self._wait_for_start([handle], f"pool {pool}")[0])

    def submit(self, pool: str, rank: int, action: str, *args: Any) -> Any:
        actor = self._actors[pool][rank]
        act = actor.act.options(concurrency_group="polls") if action in _BESIDE else actor.act
        handle = act.remote(action, args)
        self._labels[handle] = (pool, rank)
        return handle

    def wait(
        self,
        handles: Sequence[Any],
        what: str,
        timeout_s: float,
        setting: str = "call_timeout_s",
        interrupt: Interrupt = None,
    ) -> list[Reply]:
        values: dict[Any, Any] = {}
        for handle in self._finished(handles, timeout_s, interrupt):
            values[handle] = self._result(handle, what)
        if late := [handle for handle in handles if handle not in values]:
            raise DeadlineExceeded(self._diagnosis(late, what, timeout_s, setting))
        self._forget(handles)  # not after an error: the caller may wait for the others, or again
        return [values[handle] for handle in handles]

    def wait_each(
        self, handles: Sequence[Any], what: str, timeout_s: float, interrupt: Interrupt = None
    ) -> list[Reply | InfrastructureError]:
        outcomes: dict[Any, Reply | InfrastructureError] = {}
        for handle in self._finished(handles, timeout_s, interrupt):
            try:
                outcomes[handle] = reply = self._value(handle, what)
                reply.check()
            except InfrastructureError as error:
                outcomes[handle] = error
        for handle in handles:
            if handle not in outcomes:
                outcomes[handle] = DeadlineExceeded(self._diagnosis([handle], what, timeout_s, "call_timeout_s"))
        self._forget(handles)
        return [outcomes[handle] for handle in handles]

    def done(self, handles: Sequence[Any]) -> bool:
        return not ray.wait(list(handles), num_returns=len(handles), timeout=0)[1]

    def end_host(self, pool: str, rank: int) -> None:
        _end([self._actors[pool][rank]])

    def shutdown(self) -> None:
        actors = [actor for pool in self._actors.values() for actor in pool]
        self._actors.clear()
        _end(actors)
        for group in self._groups:
            remove_placement_group(group)
        self._groups.clear()
        if self._started_ray:
            ray.shutdown()
            self._started_ray = False

    def _connect(self) -> None:
        if ray.is_initialized():
            return
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        logging.getLogger("ray._private.authentication.authentication_token_setup").addFilter(_is_news)
        options: dict[str, Any] = {"logging_level": logging.WARNING}
        if self.config.address:
            _check_address(self.config.address)
            options["address"] = self.config.address
        else:
            os.environ.pop("RAY_ADDRESS", None)  # a stale one would point to a cluster that no longer exists
            self._started_ray = True
            options |= {"num_cpus": available_cores(), "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        _init_ray(self.config, options)

    def _start_pool(self, name: str, pool: PoolConfig, env: Sequence[Mapping[str, str]]) -> None:
        bundle = {"CPU": float(pool.devices_per_node * pool.cpus_per_device)}
        if pool.device == "cuda":
            bundle["GPU"] = float(pool.devices_per_node)
        group = placement_group([bundle] * pool.nodes, strategy="STRICT_SPREAD" if pool.nodes > 1 else "PACK")
        self._groups.append(group)
        if not group.wait(timeout_seconds=self.config.start_timeout_s):
            raise InfrastructureError(
                f"pool '{name}' got no devices within {self.config.start_timeout_s:g} s: other jobs on the cluster use"
                " them\nList them:  ray status     or wait longer:"
                f"  runtime.start_timeout_s={2 * self.config.start_timeout_s:g}"
            )
        actor_class = ray.remote(concurrency_groups={"control": 1, "polls": 2})(RayHost)
        self._actors[name] = [
            actor_class.options(
                num_cpus=pool.cpus_per_device,
                num_gpus=1 if pool.device == "cuda" else 0,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, rank // pool.devices_per_node),
                runtime_env=_runtime_env(pool, env[rank] if rank < len(env) else {}),
            ).remote(
                HostInfo(
                    pool=name,
                    rank=rank,
                    world_size=pool.num_devices,
                    device="cuda:0" if pool.device == "cuda" else "cpu",
                    threads=pool.cpus_per_device,
                    concurrent=True,
                ),
                alone=pool.nodes == 1,
            )
            for rank in range(pool.num_devices)
        ]

    def _join(self, pool: str) -> None:
        actors = self._actors[pool]
        (port,) = self._wait_for_start([actors[0].act.remote("free_port")], f"pool {pool}")
        where = f"tcp://{self.address(pool)}:{port}"
        handles = [self.submit(pool, rank, "join", where, self.config.call_timeout_s) for rank in range(len(actors))]
        self._wait_for_start(handles, f"process group of pool '{pool}'")

    def _wait_for_start(self, handles: Sequence[Any], what: str) -> list[Any]:
        return self.wait(handles, what, self.config.start_timeout_s, "start_timeout_s")

    def _finished(self, handles: Sequence[Any], timeout_s: float, interrupt: Interrupt) -> Iterator[Any]:
        """Yield handles as they finish, so that a failure is seen at once. Those that are late are left out."""
        deadline = time.monotonic() + timeout_s
        # quick calls finish together in one wait
        ready, pending = ray.wait(list(handles), num_returns=len(handles), timeout=min(_QUICK_S, timeout_s))
        yield from ready
        while pending:
            left = max(0.0, deadline - time.monotonic())
            ready, pending = ray.wait(pending, num_returns=1, timeout=min(left, _INTERRUPT_S))
            if not ready and not left:
                return
            yield from ready
            if interrupt:
                interrupt()

    def _forget(self, handles: Sequence[Any]) -> None:
        for handle in handles:
            self._labels.pop(handle, None)

    def _result(self, handle: Any, what: str) -> Any:
        """Return the value of a handle, or raise the failure that it reports."""
        value = self._value(handle, what)
        if isinstance(value, Reply):
            if value.failure is not None and LOST_PEER in str(value.failure.error):
                self._raise_for_dead_peer(handle, what)
            value.check()
        return value

    def _value(self, handle: Any, what: str) -> Any:
        pool, rank = self._labels.get(handle, ("?", -1))
        try:
            return ray.get(handle, timeout=GET_TIMEOUT_S)
        except ray.exceptions.RayActorError as error:
            raise HostDied(f"{what}: the host of rank {rank} of pool '{pool}' died: {_cause(error)}") from error
        except (ray.exceptions.RayTaskError, ray.exceptions.GetTimeoutError) as error:
            raise InfrastructureError(f"{what}: rank {rank} of pool '{pool}' did not respond: {error}") from error

    def _raise_for_dead_peer(self, failed: Any, what: str) -> None:
        """Wait for Ray to report a dead host: a rank that loses a peer in a collective often fails before that.

        Raises:
            HostDied: the host of another rank ended.
        """
        others = [handle for handle in self._labels if handle != failed]
        ready, _ = ray.wait(others, num_returns=len(others), timeout=_PEER_S) if others else ([], [])
        for handle in ready:
            try:
                ray.get(handle, timeout=GET_TIMEOUT_S)
            except ray.exceptions.RayActorError as error:
                pool, rank = self._labels[handle]
                raise HostDied(f"{what}: the host of rank {rank} of pool '{pool}' died: {_cause(error)}") from error

    def _diagnosis(self, pending: Sequence[Any], what: str, timeout_s: float, setting: str) -> str:
        late = [self._labels.get(handle, ("?", -1)) for handle in pending]
        lines = [f"{what} did not finish within {timeout_s:g} s; waiting for {len(late)} ranks:"]
        for pool, rank in late:
            lines.append(f"stack of rank {rank} of pool '{pool}':\n{self._stack(pool, rank)}")
        return "\n".join([*lines, f"Wait longer:  runtime.{setting}={2 * timeout_s:g}"])

    def _stack(self, pool: str, rank: int) -> str:
        try:
            return str(ray.get(self._actors[pool][rank].stack.remote(), timeout=_STACK_TIMEOUT_S))
        except (ray.exceptions.RayError, KeyError) as error:
            return f"(no stack: {type(error).__name__})"


def _end(actors: Sequence[Any]) -> None:
    """Close hosts within a limit, and end their processes."""
    closing = [call for actor in actors for call in (actor.abort.remote(), actor.act.remote("close"))]
    if closing:
        ray.wait(closing, num_returns=len(closing), timeout=_STACK_TIMEOUT_S)
    for actor in actors:
        ray.kill(actor, no_restart=True)


def _init_ray(config: RuntimeConfig, options: Mapping[str, Any]) -> None:
    """Start Ray or join a cluster, and retry after Ray's own limit of 30 s, too short for a busy machine.

    Raises:
        InfrastructureError: Ray did not start; the text has its reason.
    """
    deadline = time.monotonic() + config.start_timeout_s
    while True:
        try:
            with _signals_kept():
                ray.init(**options)
            return
        except Exception as error:  # Ray mostly raises plain exceptions
            _end_half_started(error)
            timed_out = "timed out" in str(error).lower()
            if not timed_out or time.monotonic() > deadline:
                raise InfrastructureError(_start_failure(config, error, timed_out)) from error
            logger.warning("Ray did not start (%s); trying again", _cause(error))


def _end_half_started(error: BaseException) -> None:
    """End the processes of a node that Ray gave up on, which is referenced only by the traceback."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        node = frame.f_locals.get("self")
        if isinstance(node, ray._private.node.Node):
            node.kill_all_processes(check_alive=False, allow_graceful=False)
            return


def _start_failure(config: RuntimeConfig, error: Exception, timed_out: bool) -> str:
    if config.address:
        what = f"runtime.address={config.address}: cannot join this Ray cluster: {_cause(error)}"
        return f"{what}\nIf it needs a token:  export RAY_AUTH_MODE=token   with the ~/.ray/auth_token of the cluster"
    if timed_out:
        what = f"Ray did not start within {config.start_timeout_s:g} s: {_cause(error)}"
        return f"{what}\nWait longer:  runtime.start_timeout_s={2 * config.start_timeout_s:g}"
    return (
        f"Ray did not start: {_cause(error)}\nCheck this machine:  rlcore doctor   or run without Ray:  runtime=local"
    )


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Keep our signal handlers while Ray starts, as its own would abort the process with a C++ stack trace.

    A half-started Ray cannot be shut down cleanly, so the first signal waits until it is up; a second one does not.
    """
    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    is_main = threading.current_thread() is threading.main_thread()
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            handlers[number](number, frame)

    module: Any = ray._private.utils
    install, module.set_sigterm_handler = module.set_sigterm_handler, lambda handler: None
    for number, handler in handlers.items() if is_main else ():
        signal.signal(number, receive if callable(handler) else handler)
    try:
        yield
    finally:
        module.set_sigterm_handler = install
        for number, handler in handlers.items() if is_main else ():
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0])


def _check_address(address: str) -> None:
    """Check that the address accepts connections, as Ray itself would retry for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=_STACK_TIMEOUT_S).close()
    except OSError as error:
        raise ConfigError(
            f"runtime.address={address}: no Ray cluster responds there: {error}\n"
            "Type the address that  ray start --head  printed, or remove runtime.address to start one here."
        ) from error


def _runtime_env(pool: PoolConfig, env: Mapping[str, str]) -> dict[str, Any]:
    variables = {
        "OMP_NUM_THREADS": str(pool.cpus_per_device),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        **env,
    }
    environment: dict[str, Any] = {"env_vars": variables}
    if pool.python:
        del variables["PYTHONPATH"]
        # Hosts have another working directory; on a remote cluster, the path is on its machines.
        environment["py_executable"] = os.path.abspath(shutil.which(pool.python) or pool.python)
    return environment


def _cause(error: BaseException) -> str:
    """Return the first lines of Ray's text; the rest repeats them."""
    return " ".join(" ".join(str(error).split("\n")[:6]).split())


def _is_news(record: logging.LogRecord) -> bool:
    """Return whether a record is worth logging; token authentication of a local cluster is the default."""
    return "authentication is enabled" not in record.getMessage()
