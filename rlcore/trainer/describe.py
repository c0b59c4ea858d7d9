"""A plan in words: what `rlcore train --dry-run` prints, and what a run prints first."""

from __future__ import annotations

from collections.abc import Mapping

from rlcore.config.schema import Config
from rlcore.controller.runtime import resolve_device
from rlcore.data.batch import even_sizes
from rlcore.models.load import check_directory
from rlcore.trainer.memory import (
    ModelSize,
    device_bytes,
    frozen_bytes,
    human,
    machine_bytes,
    rollout_bytes,
    trained_bytes,
)
from rlcore.trainer.plan import TRAINED, Plan


def describe(plan: Plan) -> list[str]:
    """The plan, line by line."""
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
    lines += [_plugin_line("rollout", plan.rollout.resolved)]
    where = (
        f"{config.reward.num_processes} processes" if config.reward.num_processes else "in its host, without time-out"
    )
    if plan.rewards:
        lines += [f"reward     {' + '.join(f'{r.weight:g} × {r.name}' for r in plan.rewards)} ({where})"]
    lines += ["trackers   " + (", ".join(tracker.resolved.name for tracker in plan.trackers) or "none")]
    lines += [f"runtime    {config.runtime.name}", *_arithmetic(plan), *_memory(plan)]
    return lines


def _plugin_line(kind: str, resolved: object) -> str:
    name, package = getattr(resolved, "name", ""), getattr(resolved, "package", "")
    version = getattr(resolved, "version", "")
    return f"{kind:<10} {name}" + (f" ({package} {version})" if package else " (project code)")


def _counted(plan: Plan) -> str:
    counted = {"dropped": plan.prompts.dropped, "truncated": plan.prompts.truncated}
    said = [f"{count:,} {what} as too long" for what, count in counted.items() if count]
    return f" ({', '.join(said)})" if said else ""


def _arithmetic(plan: Plan) -> list[str]:
    config = plan.config
    rows = config.trainer.prompts_per_step * config.sampling.samples_per_prompt
    devices = config.pools[plan.placement["actor"]].num_devices
    shares = even_sizes(rows, devices)
    share = f"{shares[0]}" if shares[0] == shares[-1] else f"{shares[-1]} or {shares[0]}"
    algorithm = plan.algorithm.config
    updates = getattr(algorithm, "epochs", 1) * getattr(algorithm, "minibatches", 1)
    return [
        f"step       {config.trainer.prompts_per_step} prompts × {config.sampling.samples_per_prompt} samples = {rows} rows,"
        f" {share} per device, {updates} updates; {config.trainer.steps} steps"
    ]


def _memory(plan: Plan) -> list[str]:
    """One line for each role, pool and estimate per device; and what does not fit this machine."""
    config = plan.config
    lines = []
    sums = dict.fromkeys(config.pools, 0)
    for role, pool in plan.placement.items():
        place = config.pools[pool]
        estimate = _estimate(plan, role, ModelSize.read(check_directory(plan.models[role])), place.num_devices)
        sums[pool] += estimate
        where = f"{pool} ({place.nodes} × {place.devices_per_node} {place.device})"
        lines.append(f"role       {role:<10} pool {where:<22} {human(estimate) if estimate else '-':>9} per device")
    return [*lines, *_too_much(config, {pool: need for pool, need in sums.items() if need})]


def _too_much(config: Config, sums: Mapping[str, int]) -> list[str]:
    """A warning for each kind of memory of this machine that the pools ask too much of; of a cluster nothing is known."""
    if config.runtime.address:
        return []
    cuda = {pool: need for pool, need in sums.items() if resolve_device(config.pools[pool].device) == "cuda"}
    shared = sum(need * config.pools[pool].devices_per_node for pool, need in sums.items() if pool not in cuda)
    asked = [(f"a device of pool '{pool}'", need, device_bytes()) for pool, need in cuda.items()]
    asked += [("the CPU pools", shared, machine_bytes())]
    return [
        f"warning    {human(need)} for {what}, and there are {human(has)}: lower model.max_tokens_per_device,"
        " trainer.prompts_per_step or sampling.max_response_tokens, or use more devices"
        for what, need, has in asked
        if need > has
    ]


def _estimate(plan: Plan, role: str, size: ModelSize, num_devices: int) -> int:
    config = plan.config
    half = config.model.precision == "bfloat16"
    if role in TRAINED:
        return trained_bytes(
            size,
            max_tokens=config.model.max_tokens_per_device,
            half=half,
            checkpointing=config.model.gradient_checkpointing,
        )
    if role == "rollout":
        prompts = even_sizes(config.trainer.prompts_per_step, num_devices)[0]  # the largest share
        sequences = prompts * config.sampling.samples_per_prompt
        tokens = config.data.max_prompt_tokens + config.sampling.max_response_tokens
        at_once = getattr(plan.rollout.config, "max_batch_size", sequences)
        at_once = min(at_once, max(1, getattr(plan.rollout.config, "max_batch_tokens", sequences * tokens) // tokens))
        sequences = min(sequences, at_once)
        return rollout_bytes(size, num_sequences=sequences, max_tokens=tokens, half=half)
    return frozen_bytes(size) if role != "reward" else 0
