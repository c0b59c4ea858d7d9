"""Answer for one key, its line in the translation, and names that several rules use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from rlcore_workbench.verl.command import Launch

How = Literal["set", "always", "partly", "none"]
"""set: there is an equivalent setting; always: no setting is needed; partly: a setting covers a part; none."""
ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
BATCH, MINI, MICRO = "data.train_batch_size", ACTOR + "ppo_mini_batch_size", ACTOR + "ppo_micro_batch_size_per_gpu"
ESTIMATOR = "algorithm.adv_estimator"


@dataclass(frozen=True, slots=True)
class Answer:
    """Translation of one key."""

    how: How
    settings: tuple[tuple[str, Any], ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """Key of the launch with its translation."""

    key: str
    value: str
    answer: Answer
    given: bool = True
    """False for a default of verl that differs from rlcore's."""


Rule: TypeAlias = Callable[[Launch, Any], Answer]
"""Function that translates the value of a key, given the whole launch."""


def to(note: str = "", /, **settings: Any) -> Answer:
    """Return an answer with settings; write __ for the dots in their names."""
    return Answer("set", tuple((name.replace("__", "."), value) for name, value in settings.items()), note)


def available(kind: str) -> set[str]:
    """Return the names of installed plugins, known plugins and presets."""
    from rlcore.config.compose import presets
    from rlcore.registry import catalog
    from rlcore.registry.known import known_names

    return {entry.name for entry in catalog().of(kind)} | {*known_names(kind)} | {*presets(kind)}


def only(wanted: Any, why: str, otherwise: str) -> Rule:
    """Return a rule for a key where one value needs no setting and others have no counterpart."""
    return lambda launch, value: Answer("always", note=why) if value == wanted else Answer("none", note=otherwise)
