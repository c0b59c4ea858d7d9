"""Device sharing: models in the rollout's pool are offloaded while it generates; it sleeps while they train.

The side that is called gets the devices. One side leaves completely before the other returns, so both never hold them
at once. Weights are sent while the engine is awake, from the host memory to which the trained role was offloaded.

With responses in flight (`schedule=async`), the engines first stop between two tokens and set unfinished responses
aside. These continue when the engines are called again, or waited for. This needs no offloading.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from rlcore.config.schema import Config
from rlcore.controller.group import Group
from rlcore.controller.record import Record
from rlcore.controller.runtime import cluster_decides, resolve_device
from rlcore.errors import ConfigError
from rlcore.protocols.optional import FreesDevice
from rlcore.registry import Resolved

logger = logging.getLogger(__name__)
_GIB = 2**30


class DeviceSharing:
    """Decides whether the engines or the models occupy a pool's devices. At first the engines do."""

    def __init__(
        self, engines: Sequence[Group], models: Sequence[Group], *, offloads: bool = True, sets_aside: bool = False
    ) -> None:
        """Start with awake engines and, if `offloads`, with offloaded models.

        Args:
            offloads: whether the side without the devices frees their memory.
            sets_aside: whether engines have responses in flight when a model is called, and stop.
        """
        self._engines, self._models = engines, models
        self._offloads, self._sets_aside = offloads, sets_aside
        self._generating, self._is_paused = True, False

    def acquire(self, group: Group, resume: bool = True) -> None:
        """Give the devices to this group's side, if the other side has them.

        Notes `memory_gb/…`, the memory in use on the fullest device, before and after, and `schedule/set_aside`.

        Args:
            resume: whether engines that get the devices continue their responses.
        """
        generates = group.role in {it.role for it in self._engines}
        if not (generates or group.role in {it.role for it in self._models}):
            return
        record = group.record
        engines, models = ([it.recording(record) for it in side] for side in (self._engines, self._models))
        if self._sets_aside and not generates and not self._is_paused:
            record.note("schedule/set_aside", sum(sum(engine.pause()) for engine in engines))
            self._is_paused = True
        if generates != self._generating and self._offloads:
            self._switch(generates, engines, models, record)
        self._generating = generates
        if self._is_paused and generates and resume:
            for engine in engines:
                engine.resume()
            self._is_paused = False

    def _switch(self, generates: bool, engines: Sequence[Group], models: Sequence[Group], record: Record) -> None:
        name = "to_rollout" if generates else "to_training"
        record.note(f"memory_gb/before_{name}", self._used_gib(record))
        if generates:
            for model in models:
                model.offload()
            for engine in engines:
                engine.wake()
        else:
            for engine in engines:
                engine.sleep()
            for model in models:
                model.reload()
        record.note(f"memory_gb/after_{name}", self._used_gib(record))

    def _used_gib(self, record: Record) -> float:
        runtime, pool = self._engines[0].runtime, self._engines[0].pool
        with record.blocked():
            handles = [runtime.submit(pool, rank, "memory") for rank in range(runtime.pool_size(pool))]
            replies = runtime.wait(handles, f"memory of pool '{pool}'", runtime.config.call_timeout_s)
        return float(max(reply.value for reply in replies)) / _GIB


def sharing_roles(
    config: Config,
    placement: Mapping[str, str],
    workers: Mapping[str, Resolved],
    plugins: Mapping[str, tuple[type, object]],
) -> tuple[str, ...]:
    """Return the roles that share the rollout's devices, possibly none.

    Args:
        plugins: "backend" and "rollout", each with its class and its settings.

    Raises:
        ConfigError: device_sharing=always, but sharing is not possible.
    """
    pool = placement.get("rollout")
    roles = tuple(
        role for role, worker in workers.items() if placement[role] == pool and hasattr(worker.object, "offload")
    )
    unable = [kind for kind, (plugin, own) in plugins.items() if not _able(plugin, own)]
    if config.device_sharing == "always":
        _check_able(config, pool, roles, unable)
        return roles
    if config.device_sharing == "never" or not roles or pool is None or _on_cpu(config, pool):
        return ()
    for kind in unable:
        if not isinstance(plugins[kind][0], FreesDevice):
            logger.warning(
                "%s does not declare that it can free its device (frees_device), so %s and rollout hold memory at once",
                kind,
                ", ".join(roles),
            )
    return () if unable else roles


def _on_cpu(config: Config, pool: str) -> bool:
    """Return whether offloading would free nothing. If a cluster decides, `start_roles` checks again after joining."""
    place = config.pools[pool]
    return not cluster_decides(config.runtime, place) and resolve_device(place.device) == "cpu"


def _able(plugin: type, own: object) -> bool:
    return isinstance(plugin, FreesDevice) and bool(plugin.frees_device(own))


def _check_able(config: Config, pool: str | None, roles: Sequence[str], unable: Sequence[str]) -> None:
    if not roles:
        raise ConfigError(
            f"device_sharing=always, but no model is in the rollout's pool '{pool}'\n"
            "Type  placement=colocated   or remove device_sharing"
        )
    if unable:
        chosen = {"backend": config.backend.name, "rollout": config.rollout.name}[unable[0]]
        raise ConfigError(
            f"device_sharing=always, but {unable[0]}={chosen} does not declare that it can free its device (frees_device)\n"
            f"Type  device_sharing=never   or choose another {unable[0]}"
        )
