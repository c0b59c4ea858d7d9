"""The plan as text, printed by `rlcore train --dry-run` and at the start of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from rlcore.config.schema import Config
from rlcore.controller.runtime import cluster_decides, resolve_device
from rlcore.data.shares import even_sizes
from rlcore.errors import CapacityError
from rlcore.models.load import check_directory
from rlcore.models.size import ModelSize, device_bytes, human, machine_bytes, update_bytes
from rlcore.protocols.reward import RewardSpec
from rlcore.registry import Resolved
from rlcore.trainer.plan import Plan
from rlcore.workers.plan import PoolFacts, RoleMemory

_TOKEN_BYTES = 21
"""Bytes of a token in samples that wait: id, mask, log-prob and version."""


def describe(plan: Plan) -> list[str]:
    """Return the lines that describe a plan.

    Raises:
        UserError: roles that share devices do not fit there; a model cannot be trained on its pool.
    """
    config = plan.config
    size = ModelSize.read(check_directory(config.model.path))
    lines = [
        f"run        {plan.directory}" + (f" (resumes at step {plan.resume.step})" if plan.resume else ""),
        f"model      {config.model.path}: {size.num_parameters / 1e6:,.2f} M parameters, {config.model.precision}",
        f"data       {plan.prompts.name}: {len(plan.prompts.batch):,} prompts{_counted(plan)}",
    ]
    for name, num_prompts in plan.prompts.sets.items():
        total, weights = sum(config.data.weights.values()), config.data.weights
        share = weights[name] / total if weights else num_prompts / len(plan.prompts.batch)
        lines.append(f"           {share:7.2%} {name}: {num_prompts:,} prompts")
    if plan.eval_prompts is not None:
        sizes = plan.eval_prompts.sets.values() or [len(plan.eval_prompts.batch)]
        num_used = sum(min(config.eval.max_prompts, size) for size in sizes)
        lines.append(f"eval       {plan.eval_prompts.name}: {num_used:,} of {sum(sizes):,} prompts")
    lines += [_plugin_line("algorithm", plan.algorithm.resolved), _plugin_line("backend", plan.backend.resolved)]
    lines += [_plugin_line("rollout", plan.rollout.resolved)] if "rollout" in plan.workers else []
    lines += [f"replay     {config.schedule.replay}: samples of its steps; no engine"] if config.schedule.replay else []
    if plan.environment:
        limit = f", at most {config.episode.max_turns} turns"
        lines += [_plugin_line("environment", plan.environment.resolved) + limit]
    where = (
        f"{config.reward.num_processes} processes"
        if config.reward.num_processes
        else "in the worker process, without timeout"
    )
    if plan.rewards:
        lines += [f"reward     {' + '.join(_part(r) for r in plan.rewards)} ({where})"]
    lines += ["trackers   " + (", ".join(tracker.resolved.name for tracker in plan.trackers) or "none")]
    lines += [f"runtime    {config.runtime.name}", *_arithmetic(plan), *_schedule(plan), *_memory(plan)]
    return lines


def _part(reward: RewardSpec) -> str:
    return f"{reward.weight:g} × {reward.name}" + (f" (relative: {reward.relative})" if reward.relative != "no" else "")


def _plugin_line(kind: str, resolved: Resolved) -> str:
    where = f" ({resolved.package} {resolved.version})" if resolved.package else " (project code)"
    return f"{kind:<10} {resolved.name}{where}"


def _counted(plan: Plan) -> str:
    counts = {"dropped": plan.prompts.dropped, "truncated": plan.prompts.truncated}
    parts = [f"{count:,} {what} as too long" for what, count in counts.items() if count]
    return f" ({', '.join(parts)})" if parts else ""


def _arithmetic(plan: Plan) -> list[str]:
    config = plan.config
    if "actor" not in plan.workers:  # nothing is trained
        return []
    each = len(plan.demonstrations) or config.sampling.samples_per_prompt
    rows = config.trainer.prompts_per_step * each
    dp_size = plan.workers["actor"].object.data_parallel(plan, "actor", _facts(plan, "actor"))
    shares = even_sizes(rows, dp_size)
    share = f"{shares[0]}" if shares[0] == shares[-1] else f"{shares[-1]} or {shares[0]}"
    devices_per_share = config.pools[plan.placement["actor"]].num_devices // dp_size
    epochs = f" ({config.trainer.epochs} epochs)" if config.trainer.epochs else ""
    per = "device" if devices_per_share == 1 else f"{devices_per_share} devices"
    return [
        f"step       {config.trainer.prompts_per_step} prompts × {each} {_noun(plan)} = {rows} rows,"
        f" {share} per {per}, {_updates(plan)} updates; {config.trainer.steps} steps{epochs}"
    ]


def _updates(plan: Plan) -> int:
    """Return the number of optimizer steps in a step."""
    algorithm = plan.algorithm.config
    return int(getattr(algorithm, "epochs", 1) * getattr(algorithm, "minibatches", 1))


def _schedule(plan: Plan) -> list[str]:
    """Return lines on how far generation runs ahead of training, if it does."""
    schedule = plan.config.schedule
    if not schedule.steps_ahead or schedule.replay:
        return []
    groups = (schedule.steps_ahead + 1) * plan.config.trainer.prompts_per_step
    responses = groups * plan.config.sampling.samples_per_prompt
    weights = "new weights wait for the responses in flight"
    if schedule.in_flight_updates:
        how = getattr(plan.rollout.config, "pause", "retract")
        weights = f"new weights arrive while responses are generated ({how})"
    if plan.paused_for:
        roles = f"{' + '.join(plan.paused_for)} {'computes' if len(plan.paused_for) == 1 else 'compute'}"
        weights = f"unfinished responses wait while {roles}, and continue after the update"
    num_bytes = responses * plan.workers["rollout"].object.max_tokens(plan, "rollout") * _TOKEN_BYTES
    return [
        f"schedule   {_steps(schedule.steps_ahead)} ahead, staleness at most {_steps(schedule.max_staleness)} of"
        f" {_updates(plan)} updates; {weights}",
        f"           at most {groups:,} groups, {responses:,} responses, {human(num_bytes)}, in flight or waiting",
    ]


def _steps(count: int) -> str:
    return f"{count} step{'s'[: count != 1]}"


def _noun(plan: Plan) -> str:
    if not plan.demonstrations:
        return "samples"
    return f"responses ({', '.join(plan.demonstrations)})" if len(plan.demonstrations) > 1 else "response"


def _facts(plan: Plan, role: str) -> PoolFacts:
    """Return what is known of a role's pool before the start."""
    pool = plan.config.pools[plan.placement[role]]
    device = "cuda" if cluster_decides(plan.config.runtime, pool) else resolve_device(pool.device)
    here = device == "cuda" and not plan.config.runtime.address
    return PoolFacts(
        num_devices=pool.num_devices,
        device=device,
        device_bytes=device_bytes() if here else 0,
        own_python=bool(pool.python),
    )


def _memory(plan: Plan) -> list[str]:
    """Return one line per role with its pool and memory per device, and warnings about what does not fit."""
    config = plan.config
    lines = []
    estimates = {role: worker.object.memory(plan, role, _facts(plan, role)) for role, worker in plan.workers.items()}
    needs = {role: estimate.device for role, estimate in estimates.items()}
    width = max(10, *map(len, plan.placement))
    for role, pool in plan.placement.items():
        place = config.pools[pool]
        device = "auto" if cluster_decides(config.runtime, place) else resolve_device(place.device)
        where = f"{pool} ({place.nodes} × {place.devices_per_node} {device})"
        lines.append(
            f"role       {role:<{width}} pool {where:<22} {human(needs[role]) if needs[role] else '-':>9} per device"
        )
    lines += _devices(config, sorted(set(plan.placement.values())))
    lines += [*_slow_pools(plan, needs), *_sharing(plan, estimates)]
    sums = {pool: sum(needs[role] for role, its in plan.placement.items() if its == pool) for pool in config.pools}
    if plan.sharing:
        del sums[plan.placement["rollout"]]  # checked by `_sharing`
    return [*lines, *_over_capacity(config, {pool: need for pool, need in sums.items() if need})]


def _devices(config: Config, pools: Sequence[str]) -> list[str]:
    """Return a line on pools whose device a cluster decides, or on GPUs of this machine that stay unused."""
    undecided = [f"pools.{name}.device=auto" for name in pools if cluster_decides(config.runtime, config.pools[name])]
    if undecided:
        where = f"the cluster at {config.runtime.address}"
        return [f"devices    {', '.join(undecided)}: cuda if {where} has GPUs, else cpu; decided when the run joins it"]
    used = {name: config.pools[name] for name in pools if resolve_device(config.pools[name].device) == "cuda"}
    num_used, num_gpus = sum(pool.num_devices for pool in used.values()), torch.cuda.device_count()
    if config.runtime.address or not used or num_used >= num_gpus:
        return []
    more = f"pools.{next(iter(used))}.devices_per_node={num_gpus}"
    return [f"devices    {num_used} of {num_gpus} GPUs of this machine are used; to use all:  {more}"]


def _slow_pools(plan: Plan, needs: Mapping[str, int]) -> list[str]:
    """Warn about GPUs that compute in float32, the default."""
    used = {pool for role, pool in plan.placement.items() if needs[role]}
    gpus = sorted(pool for pool in used if resolve_device(plan.config.pools[pool].device) == "cuda")
    if not gpus or plan.config.model.precision == "bfloat16":
        return []
    return [
        f"warning    model.precision=float32 is about 10 times slower than bfloat16 on the GPUs of {', '.join(gpus)}:"
        "  type  model.precision=bfloat16  (parameters and optimizer state stay in float32)"
    ]


def _sharing(plan: Plan, estimates: Mapping[str, RoleMemory]) -> list[str]:
    """Return the line on device sharing, if models and engine share devices.

    Raises:
        CapacityError: training or generating does not fit a device, or what is offloaded does not fit the host.
    """
    if not plan.sharing:
        return []
    pool = plan.placement["rollout"]
    place = plan.config.pools[pool]
    here = {role: it.device for role, it in estimates.items() if plan.placement[role] == pool and it.device}
    engines = [role for role in here if plan.workers[role].object.updated_every_step]
    models, rollouts = " + ".join(plan.sharing), " + ".join(engines)
    one, alone = len(plan.sharing) == 1, len(engines) == 1
    lines = [
        f"sharing    pool '{pool}': {models} {'is' if one else 'are'} offloaded while {rollouts}"
        f" {'generates' if alone else 'generate'};"
        f" {rollouts} {'sleeps' if alone else 'sleep'} while {models} {'trains' if one else 'train'}"
    ]
    if plan.config.runtime.address:
        auto = plan.config.device_sharing == "auto" and cluster_decides(plan.config.runtime, place)
        return [lines[0] + " (only if it has GPUs)"] if auto else lines
    if resolve_device(place.device) == "cpu":  # the device is the host, so offloading frees nothing
        what = "offloading frees nothing on CPUs, and keeping all of them"
        _check_fits(pool, what, here, place.devices_per_node, machine_bytes())
        return lines
    training = {role: need for role, need in here.items() if role not in engines}
    generating = {role: need for role, need in here.items() if role not in plan.sharing}
    size, half = ModelSize.read(check_directory(plan.models["rollout"])), plan.config.model.precision == "bfloat16"
    generating["weight update"] = update_bytes(size, half=half)
    _check_fits(pool, "training", training, 1, device_bytes())
    _check_fits(pool, "generating", generating, 1, device_bytes())
    offloaded = {role: estimates[role].offloaded for role in (*plan.sharing, *engines)}
    _check_fits(pool, "offloading to host memory", offloaded, place.devices_per_node, machine_bytes())
    return lines


def _check_fits(pool: str, what: str, needs: Mapping[str, int], times: int, has: int) -> None:
    need = times * sum(needs.values())
    if need > has:
        sum_of = " + ".join(f"{role} {human(bytes_)}" for role, bytes_ in needs.items())
        raise CapacityError(
            f"the roles of pool '{pool}' cannot share its devices: {what} needs"
            f" {f'{times} × ' if times > 1 else ''}({sum_of}) = {human(need)}, but only {human(has)} are available\n"
            "Lower model.max_tokens_per_device, trainer.prompts_per_step, sampling.max_response_tokens or the"
            " engine's share of memory (settings under rollout), use more devices, or type  placement=split"
        )


def _over_capacity(config: Config, sums: Mapping[str, int]) -> list[str]:
    """Return a warning for each kind of memory of this machine that is too small; a cluster cannot be checked."""
    if config.runtime.address:
        return []
    cuda = {pool: need for pool, need in sums.items() if resolve_device(config.pools[pool].device) == "cuda"}
    shared = sum(need * config.pools[pool].devices_per_node for pool, need in sums.items() if pool not in cuda)
    needs = [(f"each device of pool '{pool}'", need, device_bytes()) for pool, need in cuda.items()]
    needs += [("the work of all CPU pools", shared, machine_bytes())]
    return [
        f"warning    {what} needs {human(need)}, but only {human(has)} are available: lower model.max_tokens_per_device,"
        " trainer.prompts_per_step or sampling.max_response_tokens, or use more devices"
        for what, need, has in needs
        if need > has
    ]
