"""The rewards of a plan: resolved, with their settings, and checked against the columns of the data."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from rlcore.config.build import build, flatten
from rlcore.config.schema import Config, RewardItem
from rlcore.data.columns import STANDARD_COLUMNS
from rlcore.data.fields import names_of, values_of
from rlcore.errors import ConfigError, import_optional
from rlcore.protocols.reward import RewardSpec
from rlcore.registry import PYTHON, resolve
from rlcore.rewards.signature import RewardFunction, check_columns, required_columns
from rlcore.trainer.checkpoint import Checkpoint
from rlcore.trainer.prompts import Prompts


def reward_specs(config: Config, objects: Mapping[str, Any] = MappingProxyType({})) -> tuple[RewardSpec, ...]:
    """Return the resolved rewards of a run; `objects` are those that are given in Python.

    Raises:
        UserError: a reward cannot be found, has other settings, or cannot be sent to another process.
    """
    given = [("environment", config.environment.name), ("model", config.reward.model)]
    items = config.reward.items or tuple(RewardItem(name=name) for name, chosen in given if chosen)
    if not items:
        raise ConfigError(
            "no reward is chosen.\nType  reward=exact_match  or  reward=my_rewards.py:score   (rlcore list-plugins --kind reward)"
        )
    specs: list[RewardSpec] = []
    for index, item in enumerate(items):
        if item.name in objects:
            found, own, target = objects[item.name], item.name.removeprefix(PYTHON).partition("#")[0], item.name
            function = _portable(own, found, config)
        else:
            resolved = resolve("reward", item.name)
            found, own, target, function = resolved.object, resolved.name, resolved.target, None
        kind: Any = getattr(found, "Config", None)
        if kind is not None:  # unknown names get a better error when the reward is created
            known = {name: value for name, value in item.options.items() if name in kind.__dataclass_fields__}
            build(kind, known, f"reward.items[{index}]")
        earlier = sum(spec.name.partition("#")[0] == own for spec in specs)
        name = f"{own}#{earlier + 1}" if earlier else own
        specs.append(RewardSpec(name, target, dict(item.options), item.weight, item.relative, function))
    return tuple(specs)


def _portable(name: str, reward: Any, config: Config) -> Any:
    """Return a reward that is given as an object as bytes for other processes of this run, if there are any.

    Raises:
        ConfigError: it cannot be sent to another process.
    """
    if config.runtime.name == "local" and config.reward.num_processes == 0:
        return reward
    cloudpickle = import_optional("cloudpickle", f"reward '{name}', a Python object in other processes,", "cloudpickle")
    try:
        return cloudpickle.dumps(reward)
    except Exception as error:  # any object may refuse to be pickled, with any error
        raise ConfigError(
            f"reward '{name}' cannot be sent to the processes that score: {type(error).__name__}: {error}\n"
            "Create what cannot be sent inside the function, give the reward as  reward=file.py:NAME  , or run it in"
            " this process:  runtime=local reward.num_processes=0"
        ) from error


def check_objects(checkpoint: Checkpoint, config: Config) -> None:
    """Refuse to continue a run without the Python objects with which it was started."""
    before = flatten(checkpoint.state.get("config", {}))
    rewards = {item["name"] for item in before.get("reward.items", ())} - {item.name for item in config.reward.items}
    callbacks = set(before.get("plugins.hooks", ())).difference(config.plugins.hooks)
    missing = {
        what: ", ".join(sorted(name.removeprefix(PYTHON) for name in names if name.startswith(PYTHON)))
        for what, names in {"reward": rewards, "callbacks": callbacks}.items()
    }
    if any(missing.values()):
        given = ", ".join(f"{what}=[{names}]" for what, names in missing.items() if names)
        name = checkpoint.path.parent.parent.name
        raise ConfigError(
            f"{checkpoint.path}: the run was started with Python objects, which are not given now: {given}\n"
            f'Resume it from Python:  rlcore.train(…, {given}, settings={{"run.name": "{name}"}})   or start a new run: '
            " run.name=NAME"
        )


def check_rewards(rewards: Mapping[str, RewardFunction], data: Prompts, writers: Collection[str]) -> None:
    """Check that the dataset, the environment or the reward model provides every column that a reward needs."""
    table = {name: data.batch[name].tolist() for name in data.batch.columns if data.batch.level(name) == "object"}
    asked = {name for reward in rewards.values() for name in required_columns(reward)}
    given = {"environment", "reward_model"}.intersection(writers)
    columns = {*table, *(column.name for column in STANDARD_COLUMNS if column.written_by in given)}
    columns |= {name for name in asked if values_of(name, table) is not None}
    if asked - columns:
        columns |= set(names_of(table))
    if "reward_model" in given and "model_score" not in asked:
        raise ConfigError(
            "reward.model is set, but no reward uses its score\nType  reward=model  or  reward=[model,OTHER]"
        )
    for name, reward in rewards.items():
        check_columns(name, reward, columns, data.name)
