"""The plan as text, printed by `rlcore train --dry-run` and at the start of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from rlcore.config.schema import Config
from rlcore.controller.runtime import cluster_decides, resolve_device
from rlcore.data.shares import even_sizes
from rlcore.errors import CapacityError
from rlcore.models.load import check_directory
from rlcore.protocols.optional import ChecksModel, EstimatesEngine, EstimatesModel, EstimatesStep, SplitsRows
from rlcore.protocols.reward import RewardSpec
from rlcore.registry import Resolved
from rlcore.trainer.memory import (
    ModelSize,
    activation_bytes,
    device_bytes,
    frozen_bytes,
    human,
    machine_bytes,
    rollout_bytes,
    trained_bytes,
    update_bytes,
)
from rlcore.trainer.plan import TRAINED, Plan

_WITHOUT_BACKEND = ("rollout", "reward", "reward_model")


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
    if plan.eval_prompts is not None:
        held_out = min(config.eval.max_prompts, len(plan.eval_prompts.batch))
        lines.append(f"eval       {plan.eval_prompts.name}: {held_out:,} of {len(plan.eval_prompts.batch):,} prompts")
    lines += [_plugin_line("algorithm", plan.algorithm.resolved), _plugin_line("backend", plan.backend.resolved)]
    lines += [_plugin_line("rollout", plan.rollout.resolved)] if "rollout" in plan.workers else []
    if plan.environment:
        limit = f", at most {config.episode.max_turns} turns"
        lines += [_plugin_line("environment", plan.environment.resolved) + limit]
    where = (
        f"{config.reward.num_processes} processes" if config.reward.num_processes else "in its host, without timeout"
    )
    if plan.rewards:
        lines += [f"reward     {' + '.join(_part(r) for r in plan.rewards)} ({where})"]
    lines += ["trackers   " + (", ".join(tracker.resolved.name for tracker in plan.trackers) or "none")]
    lines += [f"runtime    {config.runtime.name}", *_arithmetic(plan), *_memory(plan)]
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
    each = len(plan.demonstrations) or config.sampling.samples_per_prompt
    rows = config.trainer.prompts_per_step * each
    dp_size = {role: _data_parallel(plan, role) for role in plan.placement if role not in _WITHOUT_BACKEND}["actor"]
    shares = even_sizes(rows, dp_size)
    share = f"{shares[0]}" if shares[0] == shares[-1] else f"{shares[-1]} or {shares[0]}"
    devices_per_share = config.pools[plan.placement["actor"]].num_devices // dp_size
    per = "device" if devices_per_share == 1 else f"{devices_per_share} devices"
    algorithm = plan.algorithm.config
    updates = getattr(algorithm, "epochs", 1) * getattr(algorithm, "minibatches", 1)
    return [
        f"step       {config.trainer.prompts_per_step} prompts × {each} {_noun(plan)} = {rows} rows,"
        f" {share} per {per}, {updates} updates; {config.trainer.steps} steps"
    ]


def _noun(plan: Plan) -> str:
    if not plan.demonstrations:
        return "samples"
    return f"responses ({', '.join(plan.demonstrations)})" if len(plan.demonstrations) > 1 else "response"


def _data_parallel(plan: Plan, role: str) -> int:
    """Return the data-parallel size of a role. A backend that runs in another Python counts every device."""
    pool = plan.config.pools[plan.placement[role]]
    backend = plan.backend.resolved.object
    if pool.python or not isinstance(backend, SplitsRows):
        return pool.num_devices
    model = replace(plan.config.model, path=plan.models[role])
    device = "cuda" if cluster_decides(plan.config.runtime, pool) else resolve_device(pool.device)
    return backend.data_parallel(plan.backend.config, model=model, world_size=pool.num_devices, device=device)


def _memory(plan: Plan) -> list[str]:
    """Return one line per role with its pool and memory per device, and warnings about what does not fit."""
    config = plan.config
    lines = []
    needs: dict[str, int] = {}
    for role, pool in plan.placement.items():
        place = config.pools[pool]
        needs[role] = _estimate(plan, role)
        device = "auto" if cluster_decides(config.runtime, place) else resolve_device(place.device)
        where = f"{pool} ({place.nodes} × {place.devices_per_node} {device})"
        lines.append(
            f"role       {role:<10} pool {where:<22} {human(needs[role]) if needs[role] else '-':>9} per device"
        )
    lines += _devices(config, sorted(set(plan.placement.values())))
    lines += [*_slow_pools(plan), *_sharing(plan, needs)]
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


def _slow_pools(plan: Plan) -> list[str]:
    """Warn about GPUs that compute in float32, the default."""
    used = {pool for role, pool in plan.placement.items() if role != "reward"}
    gpus = sorted(pool for pool in used if resolve_device(plan.config.pools[pool].device) == "cuda")
    if not gpus or plan.config.model.precision == "bfloat16":
        return []
    return [
        f"warning    model.precision=float32 is about 10 times slower than bfloat16 on the GPUs of {', '.join(gpus)}:"
        "  type  model.precision=bfloat16  (parameters and optimizer state stay in float32)"
    ]


def _sharing(plan: Plan, needs: Mapping[str, int]) -> list[str]:
    """Return the line on device sharing, if models and engine share devices.

    Raises:
        CapacityError: training or generating does not fit a device, or what is offloaded does not fit the host.
    """
    if not plan.sharing:
        return []
    pool = plan.placement["rollout"]
    place = plan.config.pools[pool]
    here = {role: need for role, need in needs.items() if plan.placement[role] == pool and need}
    roles, one = " + ".join(plan.sharing), len(plan.sharing) == 1
    lines = [
        f"sharing    pool '{pool}': {roles} {'is' if one else 'are'} offloaded while rollout generates;"
        f" rollout sleeps while {roles} {'trains' if one else 'train'}"
    ]
    if plan.config.runtime.address:
        auto = plan.config.device_sharing == "auto" and cluster_decides(plan.config.runtime, place)
        return [lines[0] + " (only if it has GPUs)"] if auto else lines
    if resolve_device(place.device) == "cpu":  # the device is the host, so offloading frees nothing
        what = "offloading frees nothing on CPUs, and keeping all of them"
        _check_fits(pool, what, here, place.devices_per_node, machine_bytes())
        return lines
    training = {role: need for role, need in here.items() if role != "rollout"}
    generating = {role: need for role, need in here.items() if role not in plan.sharing}
    size, half = ModelSize.read(check_directory(plan.models["rollout"])), plan.config.model.precision == "bfloat16"
    generating["weight update"] = update_bytes(size, half=half)
    _check_fits(pool, "training", training, 1, device_bytes())
    _check_fits(pool, "generating", generating, 1, device_bytes())
    parked = {role: _parked(plan, role) for role in plan.sharing}
    parked["rollout"] = rollout_bytes(size, num_sequences=0, max_tokens=0, half=half) // _engine_ranks(plan)
    _check_fits(pool, "offloading to host memory", parked, place.devices_per_node, machine_bytes())
    return lines


def _engine_ranks(plan: Plan) -> int:
    """Return the number of devices that one engine's weights are split over."""
    return int(getattr(plan.rollout.config, "tensor_parallel", 1))


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


def _estimate(plan: Plan, role: str) -> int:
    """Return the bytes that a role needs on one device."""
    config, size = plan.config, ModelSize.read(check_directory(plan.models[role]))
    half = config.model.precision == "bfloat16"
    if role == "reward":
        return 0
    if role == "rollout":
        pool = config.pools[plan.placement[role]]
        prompts = even_sizes(config.trainer.prompts_per_step, pool.num_devices)[0]  # the largest share
        sequences = prompts * config.sampling.samples_per_prompt
        tokens = config.data.max_prompt_tokens + config.sampling.max_response_tokens
        if plan.environment:
            tokens = min(config.episode.max_tokens or size.context_length, size.context_length)
        at_once = getattr(plan.rollout.config, "max_batch_size", sequences)
        at_once = min(at_once, max(1, getattr(plan.rollout.config, "max_batch_tokens", sequences * tokens) // tokens))
        sequences = min(sequences, at_once)
        weights, whole = (
            rollout_bytes(size, num_sequences=count, max_tokens=tokens, half=half) // _engine_ranks(plan)
            for count in (0, sequences)
        )
        engine = plan.rollout.resolved.object
        on = resolve_device(pool.device)
        if not pool.python and isinstance(engine, ChecksModel):
            engine.check_model(plan.rollout.config, model=config.model, device=on)
        if pool.python or not isinstance(engine, EstimatesEngine):
            return whole
        known = on == "cuda" and not config.runtime.address
        device = device_bytes() if known else 0
        return engine.engine_bytes(plan.rollout.config, weights, whole - weights, device=device)
    held = _model_bytes(plan, role) + _working_bytes(plan, role)
    if role not in TRAINED:
        return held
    tokens, checkpointing = config.model.max_tokens_per_device, config.model.gradient_checkpointing
    return held + activation_bytes(size, max_tokens=tokens, half=half, checkpointing=checkpointing)


def _model_bytes(plan: Plan, role: str) -> int:
    """Return the bytes of a role's parameters, gradients and optimizer state on one device."""
    size, trained = ModelSize.read(check_directory(plan.models[role])), role in TRAINED
    backend = plan.backend.resolved.object
    if role == "reward_model" or not isinstance(backend, EstimatesModel):
        return trained_bytes(size) if trained else frozen_bytes(size)
    world_size = plan.config.pools[plan.placement[role]].num_devices
    return backend.model_bytes(plan.backend.config, size.num_parameters, world_size=world_size, trained=trained)


def _working_bytes(plan: Plan, role: str) -> int:
    """Return the bytes that a step needs on one device in addition to the model and its activations."""
    backend = plan.backend.resolved.object
    if role == "reward_model" or not isinstance(backend, EstimatesStep):
        return 0
    size = ModelSize.read(check_directory(plan.models[role]))
    world_size = plan.config.pools[plan.placement[role]].num_devices
    precision, trained = plan.config.model.precision, role in TRAINED
    return backend.working_bytes(plan.backend.config, size, precision=precision, world_size=world_size, trained=trained)


def _parked(plan: Plan, role: str) -> int:
    """Return the bytes of an offloaded role in host memory, which no longer include its gradients."""
    return _model_bytes(plan, role) * 3 // 4 if role in TRAINED else _model_bytes(plan, role)
