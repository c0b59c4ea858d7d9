"""Turn a config into a plan: everything that can be checked before a process is started.

A plan holds plugins, files, columns, prompts and placement. `rlcore train --dry-run` prints it (describe.py) and
stops; launch.py starts the hosts.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlcore.config.build import build_plugin
from rlcore.config.schema import Choice, Config
from rlcore.data.columns import STANDARD_COLUMNS
from rlcore.data.loader import PromptLoader
from rlcore.errors import ConfigError, did_you_mean
from rlcore.models.load import check_directory
from rlcore.models.size import ModelSize
from rlcore.protocols.algorithm import RoleSpec
from rlcore.protocols.optional import (
    ComparesSamples,
    CorrectsStaleness,
    Evaluates,
    LearnsFromLabels,
    LearnsFromTexts,
    LearnsTurns,
    TrainsUnits,
)
from rlcore.protocols.reward import RewardSpec
from rlcore.registry import Resolved, misspellings, resolve
from rlcore.rewards.runner import build_reward
from rlcore.trainer.best import check_best
from rlcore.trainer.checkpoint import Checkpoint, newest
from rlcore.trainer.evaluate import groups_of
from rlcore.trainer.in_flight import check_engine
from rlcore.trainer.prompts import Prompts, check_demonstrations, join, load_sets, warn_repeats
from rlcore.trainer.recording import check_recording
from rlcore.trainer.reward_plan import check_objects, check_rewards, reward_specs
from rlcore.trainer.role_plan import plan_models, plan_roles, without
from rlcore.trainer.sampling_plan import check_sampling
from rlcore.trainer.sharing import sharing_roles

logger = logging.getLogger(__name__)
DEFAULT_ROLE = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A plugin with its settings."""

    resolved: Resolved
    config: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A checked run, before the first process is started."""

    config: Config
    directory: Path
    backend: Chosen
    rollout: Chosen
    algorithm: Chosen
    environment: Chosen | None
    trackers: tuple[Chosen, ...]
    rewards: tuple[RewardSpec, ...]
    roles: Mapping[str, RoleSpec]
    """Role -> specification with its defaults, in the order of creation: trained roles first."""
    workers: Mapping[str, Resolved]
    """Role -> worker class."""
    models: Mapping[str, str]
    """Role -> directory of its model."""
    placement: Mapping[str, str]
    """Role -> pool."""
    reads: Mapping[str, Sequence[str]]
    """Trained role -> columns that are sent to its update."""
    prompts: Prompts
    eval_prompts: Prompts | None
    resume: Checkpoint | None
    demonstrations: tuple[str, ...] = ()
    """Columns that the algorithm reads as responses instead of sampling."""
    sharing: tuple[str, ...] = ()
    """Roles that share devices with the rollout and are offloaded while it generates."""

    @property
    def paused_for(self) -> tuple[str, ...]:
        """Roles of the rollout's pool for which it sets unfinished responses aside."""
        pool = self.placement.get("rollout") if self.config.schedule.in_flight_updates else None
        beside = [it for it, worker in self.workers.items() if pool == self.placement[it] and _has_model(worker)]
        return tuple(beside) if self.sharing or any(self.roles[it].loss for it in beside) else ()

    @property
    def versions(self) -> dict[str, str]:
        """Package -> version of every plugin in this run."""
        chosen = [self.backend.resolved, self.rollout.resolved, self.algorithm.resolved, *self.workers.values()]
        chosen += [tracker.resolved for tracker in self.trackers]
        chosen += [self.environment.resolved] if self.environment else []
        return {resolved.package: resolved.version for resolved in chosen if resolved.package}


def _has_model(worker: Resolved) -> bool:
    return hasattr(worker.object, "offload")


def make_plan(config: Config, directory: Path, objects: Mapping[str, Any] = MappingProxyType({})) -> Plan:
    """Resolve and check everything, without starting or writing anything.

    Args:
        objects: name in the config, `python:NAME` -> reward that is given as a Python object.

    Raises:
        UserError: for anything that the user can fix, with what to type.
    """
    algorithm = choose("algorithm", config.algorithm)
    instance = algorithm.resolved.object(algorithm.config)
    roles, workers = plan_roles(config, instance)
    placement = place(config, roles)
    environment = choose_environment(config, workers)
    rewards = reward_specs(config, objects) if "reward" in workers else ()
    columns = tuple(instance.demonstrations) if isinstance(instance, LearnsFromTexts) else ()
    labels = tuple(instance.labels) if isinstance(instance, LearnsFromLabels) else ()
    demonstrations = columns if "rollout" in without(instance) else ()
    writes, every_turn = instance.writes(), isinstance(instance, LearnsTurns) and instance.every_turn
    load = partial(load_sets, config, writes=writes, responses=columns, every_turn=every_turn)
    train, held_out = load(config.data.train), load(config.data.eval)
    made = {spec.name: build_reward(spec) for spec in rewards}
    for data in (*train.values(), *held_out.values()):
        check_rewards(made, data, [*workers, *(["environment"] if environment else [])])
        if data in train.values() or isinstance(instance, Evaluates):
            check_demonstrations(config.algorithm.name, columns, data, labels)
        _check_lengths(config, data)
    prompts, eval_prompts = join(train), join(held_out) if held_out else None
    config = _with_steps(config, len(prompts.batch))
    if eval_prompts:
        groups_of(eval_prompts, range(len(eval_prompts.batch)), config.eval.by)
    _check_columns(config, instance, workers, prompts)
    warn_repeats(config, prompts)
    few = config.sampling.samples_per_prompt == 1
    compares = isinstance(instance, ComparesSamples) and instance.compares_samples
    if compares and (few or config.sampling.temperature == 0):
        logger.warning(
            "algorithm '%s' compares the samples of a prompt, but %s: nothing is learned; type  %s",
            config.algorithm.name,
            "there is only one" if few else "all are the same with sampling.temperature=0",
            "sampling.samples_per_prompt=8" if few else "sampling.temperature=1",
        )
    if config.transfer != "auto":
        resolve("transfer", config.transfer)
    backend, rollout = choose("backend", config.backend), choose("rollout", config.rollout)
    engines = {kind: (it.resolved.object, it.config) for kind, it in {"backend": backend, "rollout": rollout}.items()}
    plan = Plan(
        config=config,
        directory=directory,
        backend=backend,
        rollout=rollout,
        algorithm=algorithm,
        environment=environment,
        trackers=tuple(choose("tracker", choice, section="trackers") for choice in config.trackers),
        rewards=rewards,
        roles=roles,
        workers=workers,
        models=plan_models(config, algorithm.config, roles),
        placement=placement,
        reads={role: _update_columns(columns, instance) for role, columns in instance.reads().items()},
        prompts=prompts,
        eval_prompts=eval_prompts,
        resume=_find_checkpoint(config, directory, roles, workers, make_loader(config, prompts, demonstrations)),
        demonstrations=demonstrations,
        sharing=sharing_roles(config, placement, workers, engines),
    )
    for role, worker in workers.items():
        worker.object.check(plan, role)
    check_best(config, eval_prompts is not None)
    if "rollout" in roles:
        check_sampling(config, rollout, instance)
    schedule = config.schedule
    generates = "rollout" in roles and "rollout" not in without(instance)
    if (name := "replay" if schedule.replay else "record" if schedule.record else "") and not generates:
        raise ConfigError(
            f"schedule.{name}: algorithm '{config.algorithm.name}' generates nothing\nRemove  schedule.{name}"
        )
    if schedule.replay:
        return _without_engine(plan)
    if schedule.steps_ahead:
        _check_schedule(plan, instance)
    return plan


def _with_steps(config: Config, num_prompts: int) -> Config:
    """Return the config with the number of steps that trainer.epochs stands for."""
    trainer = config.trainer
    steps = -(-trainer.epochs * num_prompts // trainer.prompts_per_step) or trainer.steps
    return replace(config, trainer=replace(trainer, steps=steps))


def leave_out(plan: Plan, role: str) -> Plan:
    """Return the plan without a role that is not started."""
    specs = {name: replace(it, weights_from="") if it.weights_from == role else it for name, it in plan.roles.items()}
    return replace(
        plan,
        roles={name: spec for name, spec in specs.items() if name != role},
        workers={name: worker for name, worker in plan.workers.items() if name != role},
        placement={name: pool for name, pool in plan.placement.items() if name != role},
        sharing=tuple(name for name in plan.sharing if name != role),
    )


def _without_engine(plan: Plan) -> Plan:
    """Return the plan of a run that trains on recorded samples, after checking that they fit."""
    config = plan.config
    steps = range(plan.resume.step + 1 if plan.resume else 1, config.trainer.steps + 1)
    check_recording(config.schedule.replay, make_loader(config, plan.prompts), steps, config.trainer.prompts_per_step)
    if plan.eval_prompts is not None:
        logger.warning(
            "schedule.replay starts no engine, so this run has no evaluation; type  rlcore eval RUN  to score its checkpoints"
        )
    return replace(leave_out(plan, "rollout"), eval_prompts=None)


def make_loader(config: Config, prompts: Prompts, demonstrations: Sequence[str] = ()) -> PromptLoader:
    """Create the loader of a run with this config; demonstrations are read instead of sampled."""
    return PromptLoader(
        len(prompts.batch),
        config.run.seed,
        config.data.shuffle,
        prompts.fingerprint,
        prompts.columns,
        None if demonstrations else config.sampling.samples_per_prompt,
        {name: (prompts.sets[name], config.data.weights[name]) for name in prompts.sets if config.data.weights},
    )


def choose(kind: str, choice: Choice, section: str = "") -> Chosen:
    """Resolve a plugin and build its settings."""
    resolved = resolve(kind, choice.name)
    for message in misspellings(kind, resolved.object):
        logger.warning("%s '%s': %s", kind, choice.name, message)
    return Chosen(resolved=resolved, config=build_plugin(section or kind, choice, resolved.object))


def choose_environment(config: Config, roles: Collection[str]) -> Chosen | None:
    """Return the environment with its settings, if any; its worker checks it later.

    Raises:
        UserError: this run generates nothing, or there is no such environment.
    """
    if not config.environment.name:
        return None
    if "rollout" not in roles:
        raise ConfigError(
            f"environment={config.environment.name}: algorithm '{config.algorithm.name}' generates nothing\n"
            "Remove  environment   or choose another algorithm:  algorithm=grpo"
        )
    return choose("environment", config.environment)


def place(config: Config, roles: Mapping[str, RoleSpec]) -> dict[str, str]:
    """Return role -> pool for the roles of this run.

    Raises:
        ConfigError: a role has no pool, a pool is not defined, or a name in `placement` is not a role.
    """
    known = [*roles, "critic", "reference", DEFAULT_ROLE]
    for role, pool in config.placement.items():
        if role not in known:
            raise ConfigError(
                f"placement.{role}: no role '{role}' in this run.{did_you_mean(role, known)}\n"
                f"Roles: {', '.join(roles)}; '{DEFAULT_ROLE}' stands for all others."
            )
        if pool not in config.pools:
            raise ConfigError(
                f"placement.{role}={pool}: no pool '{pool}'.{did_you_mean(pool, list(config.pools))}\n"
                f"Pools: {', '.join(config.pools)}; define it with pools.{pool}.devices_per_node=1"
            )
    default = config.placement.get(DEFAULT_ROLE) or next(iter(config.pools))
    placement = {role: config.placement.get(role, default) for role in roles}
    for role, pool in placement.items():
        if config.runtime.name == "local" and roles[role].loss and config.pools[pool].num_devices > 1:
            raise ConfigError(  # one process cannot hold two ranks of a process group
                f"runtime=local trains in one process, but pool '{pool}' of role '{role}' has"
                f" {config.pools[pool].num_devices} devices\nType  runtime=ray  or  pools.{pool}.devices_per_node=1"
            )
    return placement


def _check_lengths(config: Config, data: Prompts) -> None:
    """Check that every prompt leaves room for a response in the model's context."""
    longest, room = int(data.batch.lengths.max()), ModelSize.read(check_directory(config.model.path)).context_length
    if longest >= room:
        raise ConfigError(
            f"{data.name}: its longest prompt has {longest} tokens, but the context of {config.model.path} is {room}\n"
            f"Type  data.max_prompt_tokens={room - 1} data.overlong=drop"
        )
    limit = config.sampling.max_response_tokens
    if longest + limit > room:
        logger.warning(
            "%s: a prompt of %d tokens leaves %d of the model's context of %d; responses end there, before"
            " sampling.max_response_tokens=%d",
            *(data.name, longest, room - longest, room, limit),
        )


def _check_columns(config: Config, algorithm: Any, workers: Mapping[str, Resolved], prompts: Prompts) -> None:
    """Check that every column that a loss reads is written by a role of this run or by the algorithm itself."""
    written = {*algorithm.writes(), *prompts.batch.columns}
    for column in STANDARD_COLUMNS:
        writers = {"loader", "core", *workers, *(["environment"] if config.environment.name else [])}
        if {writer.strip() for writer in column.written_by.split(",")} & writers:
            written.add(column.name)
    unit = [algorithm.unit.column] if isinstance(algorithm, TrainsUnits) else []
    for role, columns in algorithm.reads().items():
        for name in [*columns, *unit]:
            if name in written:
                continue
            writer = next((column.written_by for column in STANDARD_COLUMNS if column.name == name), None)
            hint = f"It is written by: {writer}." if writer else did_you_mean(name, sorted(written)).strip()
            raise ConfigError(
                f"algorithm '{config.algorithm.name}' reads column '{name}' in the update of '{role}', but no role of this"
                f" run writes it.\n{hint} Roles: {', '.join(workers)}."
            )


def _update_columns(columns: Sequence[str], algorithm: Any) -> tuple[str, ...]:
    """Return the columns of an update: those of the loss, of every model, and for the engine's log-prob gap."""
    engine = [] if "rollout" in without(algorithm) else ["rollout_log_probs", "first_version"]
    return tuple(dict.fromkeys(["input_ids", "loss_mask", *engine, *columns]))


def _check_schedule(plan: Plan, algorithm: Any) -> None:
    """Check that responses can be generated while the actor trains."""
    setting = f"schedule.steps_ahead={plan.config.schedule.steps_ahead}"
    if "rollout" in without(algorithm) or "rollout" not in plan.roles:
        raise ConfigError(f"{setting}: algorithm '{plan.config.algorithm.name}' generates nothing\nType  schedule=sync")
    pool = plan.placement["rollout"]
    beside = [role for role in plan.roles if plan.placement[role] == pool and role != "rollout"]
    trained = [role for role in beside if plan.roles[role].loss]
    if (trained or plan.sharing) and not plan.config.schedule.in_flight_updates:
        raise ConfigError(
            f"{setting}: role '{(*trained, *plan.sharing)[0]}' needs the devices of pool '{pool}' while the rollout"
            " generates\nType  schedule=async  (responses continue after each update)   or  placement=split   or"
            "  schedule=sync"
        )
    if plan.config.schedule.in_flight_updates:
        check_engine(plan.config.rollout.name, plan.rollout, plan.paused_for)
        beside = []  # their calls wait for no response
    for role in beside:
        logger.warning(
            "%s: role '%s' is in the rollout's pool '%s', so its calls wait for responses of later steps; type  %s",
            *(setting, role, pool, f"placement.{role}={plan.placement['actor']}"),
        )
    if not (isinstance(algorithm, CorrectsStaleness) and algorithm.corrects):
        weighted = hasattr(plan.algorithm.config, "correction")
        logger.warning(
            "schedule.max_staleness=%d: algorithm '%s' does not correct for samples of older weights; type  %s",
            *(plan.config.schedule.max_staleness, plan.config.algorithm.name),
            "algorithm.correction.weight=token" if weighted else "schedule=sync",
        )


def _find_checkpoint(
    config: Config,
    directory: Path,
    roles: Mapping[str, RoleSpec],
    workers: Mapping[str, Resolved],
    loader: PromptLoader,
) -> Checkpoint | None:
    """Return the checkpoint to resume from; refused if prompts changed or the checkpoint lacks the state of a role."""
    if config.run.resume == "never":
        return None
    latest = newest(directory / "checkpoints", checksums=True)
    if latest is None and config.run.resume == "must":
        siblings = [path.name for path in directory.parent.glob("*") if path != directory]
        near = difflib.get_close_matches(directory.name, siblings, n=1)
        hint = f" Did you mean run.name={near[0]}?" if near else ""
        raise ConfigError(
            f"run.resume=must, but there is no complete checkpoint in {directory}/checkpoints.{hint}\n"
            "Type  run.resume=auto  to start from the beginning if there is none."
        )
    stateful = [role for role, spec in roles.items() if workers[role].object.has_state(spec)]
    if latest is not None and (new := [role for role in stateful if not (latest.path / role).is_dir()]):
        before = latest.state["config"]["algorithm"]["name"]
        same = before == config.algorithm.name
        raise ConfigError(
            f"{latest.path} has no state of role '{new[0]}': it was trained with"
            f" {'other settings of ' if same else ''}algorithm={before}\n"
            f"{'Use these settings' if same else f'Type  algorithm={before}'}   or start a new run:  run.name=NAME"
        )
    if latest is not None:
        check_objects(latest, config)
        loader.load_state_dict(latest.state["loader"])
    return latest
