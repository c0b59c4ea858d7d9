"""Turn a plan into a run: start hosts, create workers, restore the checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TextIO

from rlcore.config.schema import Config
from rlcore.controller.group import Group, spawn
from rlcore.controller.make import make_runtime
from rlcore.controller.runtime import Runtime
from rlcore.errors import ConfigError
from rlcore.hooks.manager import Hooks
from rlcore.protocols.optional import ShowsMetrics
from rlcore.protocols.tracker import RunInfo
from rlcore.protocols.transfer import Transfer
from rlcore.registry import resolve
from rlcore.trainer.checkpoint import Checkpoints, hold, newest
from rlcore.trainer.evaluate import held_out
from rlcore.trainer.plan import Plan, make_loader
from rlcore.trainer.prefetch import Prefetcher
from rlcore.trainer.recording import Replay, prepare
from rlcore.trainer.roles import Roles
from rlcore.trainer.run import Run, error_text
from rlcore.trainer.sharing import DeviceSharing
from rlcore.trainer.starts import record_start
from rlcore.trainer.step import PromptSource, Step
from rlcore.types import Sampling

logger = logging.getLogger(__name__)


def launch(plan: Plan, hooks: Hooks) -> Run:
    """Start the run that a plan describes. If anything fails, shut down what was started."""
    config = plan.config
    runtime = make_runtime(config.runtime)
    lock = hold(plan.directory)
    _check_resume(plan, lock)
    algorithm = plan.algorithm.resolved.object(plan.algorithm.config)
    shows = algorithm.shows if isinstance(algorithm, ShowsMetrics) else {}
    info = RunInfo(name=plan.directory.name, directory=plan.directory, total_steps=config.trainer.steps, shows=shows)
    run = Run(
        config=config,
        directory=plan.directory,
        runtime=runtime,
        algorithm=algorithm,
        source=PromptSource(loader=make_loader(config, plan.prompts, plan.demonstrations), prompts=plan.prompts.batch),
        held_out=held_out(plan.eval_prompts, config) if plan.eval_prompts else None,
        checkpoints=Checkpoints(plan.directory / "checkpoints", config.checkpoint.keep_last),
        trackers=[tracker.resolved.object(tracker.config, info) for tracker in plan.trackers],
        hooks=hooks,
        versions=plan.versions,
        lock=lock,
    )
    try:
        run.signals.install()
        _start(plan, run)
    except BaseException as error:
        done = {"steps": run.counters.step, "total_steps": info.total_steps, "seconds": run.counters.seconds}
        run.close({**done, "error": error_text(error)})
        raise
    return run


def _check_resume(plan: Plan, lock: TextIO) -> None:
    """Check that no newer checkpoint appeared before this process locked the directory."""
    directory, planned = plan.directory / "checkpoints", plan.resume.step if plan.resume else None
    latest = None if plan.config.run.resume == "never" else newest(directory)
    if latest is not None and latest.step != planned:  # new, or damaged
        latest = newest(directory, checksums=True)
    if latest is not None and latest.step != planned:
        lock.close()
        raise ConfigError(
            f"{plan.directory}: another process has just written the checkpoint of step {latest.step}\n"
            "Run the same command again to resume from it."
        )


def _start(plan: Plan, run: Run) -> None:
    run.checkpoints.sweep(plan.resume.step if plan.resume else None)
    if plan.config.schedule.record:
        prepare(plan.directory, run.source.loader, plan.resume.step if plan.resume else 0)
    if plan.resume is None:
        run.checkpoints.set_aside()
    record_start(plan)
    trackers, run.trackers = run.trackers, []
    for tracker in trackers:
        run.start_tracker(tracker, plan.resume.step if plan.resume else None)
    run.phase("start")
    run.roles = start_roles(plan, run.runtime, run.hooks, list(plan.workers), run)
    if plan.resume is not None:
        run.phase("restore")
        run.restore(plan.resume.state)
        roles = run.roles.during(Step(number=plan.resume.step, on_wait=run.phase))
        for group in roles.with_state():
            group.load(str(plan.resume.path))
        roles.sync(version=plan.resume.step)
        if roles.prefetcher is not None:
            roles.prefetcher.load(plan.resume.path, plan.resume.step + 1)


def start_roles(plan: Plan, runtime: Runtime, hooks: Hooks, names: Sequence[str], run: Run | None = None) -> Roles:
    """Start the pools of these roles and create their workers.

    Args:
        run: the training run that they serve; without one, there are no more prompts, hooks or weights.
    """
    config = plan.config
    placement = {role: pool for role, pool in plan.placement.items() if role in names}
    pools = {name: pool for name, pool in config.pools.items() if name in placement.values()}
    runtime.start(pools, {name: _process_env(hooks, config, placement, name) for name in pools})
    sharing = [role for role in plan.sharing if role in names and "rollout" in names]
    if config.device_sharing == "auto" and sharing and runtime.device(placement["rollout"]) == "cpu":
        sharing = []  # planned for GPUs, which the cluster turned out not to have
    engines = [role for role in placement if plan.workers[role].object.updated_every_step]
    groups: dict[str, Any] = {}
    for role in sorted(placement, key=lambda role: bool(sharing) and role in engines):
        groups[role] = _spawn(plan, runtime, role)
        if role in sharing:
            groups[role].offload()  # an engine allocates the memory that is free when it is created
    paused_for = plan.paused_for if run else ()
    devices: DeviceSharing | None = None
    if beside := sharing or paused_for:
        devices = DeviceSharing(
            [groups[role] for role in engines if placement[role] == placement["rollout"]],
            [groups[role] for role in beside],
            offloads=bool(sharing),
            sets_aside=bool(paused_for),
        )
    prefetcher: Prefetcher | Replay | None = None
    if run and config.schedule.replay:
        trained = [group for role, group in groups.items() if plan.roles[role].loss]
        per_prompt = config.sampling.samples_per_prompt
        prefetcher = Replay(config.schedule.replay, run.source, runtime.store, per_prompt, trained)
    elif run and config.schedule.steps_ahead:
        _tolerate(config, groups, placement)
        prefetcher = Prefetcher(run.source, groups, sampling(config), config, lambda: run.signals.asked, devices)
    return Roles(
        groups,
        sampling=sampling(config),
        samples_per_prompt=config.sampling.samples_per_prompt,
        reward=config.reward,
        rewards=plan.rewards,
        specs=plan.roles,
        transfers=_transfers(plan, groups) if run else {},
        sharing=devices,
        source=run.source if run else None,
        prefetcher=prefetcher,
        on_scored=run.note_scored if run else None,
    )


def _tolerate(config: Config, groups: Mapping[str, Group], placement: Mapping[str, str]) -> None:
    """Let engines fail that have their pool to themselves, as their hosts end."""
    limit, pool = config.schedule.max_engine_failures, placement["rollout"]
    others = [role for role, placed in placement.items() if placed == pool and role != "rollout"]
    if limit and not others:
        groups["rollout"].members.tolerate(limit, keeper=placement["actor"])
    elif limit and len(groups["rollout"].ranks) > 1:
        text = "schedule.max_engine_failures=%d has no effect: pool '%s' of the engines has other roles (%s), which need its hosts"
        logger.warning(text, limit, pool, ", ".join(others))


def sampling(config: Config) -> Sampling:
    """Return the sampling settings for training."""
    return Sampling(**{field.name: getattr(config.sampling, field.name) for field in fields(Sampling)})


def _spawn(plan: Plan, runtime: Runtime, role: str) -> Any:
    resolved = plan.workers[role]
    return spawn(
        resolved.object,
        runtime,
        role=role,
        pool=plan.placement[role],
        spec=resolved.spec,
        options=resolved.object.options_of(plan, role),
        reads={"update": plan.reads[role]} if role in plan.reads else {},
    )


def _transfers(plan: Plan, groups: Mapping[str, Group]) -> dict[tuple[str, str], Transfer]:
    """Return (source, target) -> transfer for every role that receives weights; `transfer` applies to rollouts."""
    transfers: dict[tuple[str, str], Transfer] = {}
    for role, target in groups.items():
        if not (name := plan.roles[role].weights_from):
            continue
        source = groups[name]
        method = plan.config.transfer if plan.workers[role].object.updated_every_step else "auto"
        if method == "auto":
            method = "inprocess" if source.pool == target.pool else "object_store"
        transfers[name, role] = resolve("transfer", method).object(source=source, target=target)
    return transfers


def _process_env(hooks: Hooks, config: Config, placement: Mapping[str, str], pool: str) -> list[dict[str, str]]:
    """Return, for each rank of a pool, the environment variables that plugins set before a host imports anything."""
    roles = [role for role, placed in placement.items() if placed == pool]
    environments = []
    for rank in range(config.pools[pool].num_devices):
        merged: dict[str, str] = {}
        for role in roles:
            merged |= hooks.worker_env(config=config, role=role, rank=rank)
        environments.append(merged)
    return environments
