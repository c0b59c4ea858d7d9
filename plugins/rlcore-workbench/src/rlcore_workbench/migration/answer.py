"""Answer for one key of a launch, and its line in the translation."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from rlcore_workbench.migration.launch import Launch

How = Literal["set", "always", "partly", "none"]
"""set: there is an equivalent setting; always: no setting is needed; partly: a setting covers a part; none."""
HOWS: tuple[How, ...] = get_args(How)


_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+(?<!\.json)(?<!\.jsonl)(?<!\.parquet)(?<!\.csv)(?<!\.arrow)")

PROJECTS = {"wandb": "project", "swanlab": "project", "trackio": "project", "mlflow": "experiment"}
"""Tracker -> its setting for the project."""
TRACKERS = {"console": "console", "file": "jsonl", "tensorboard": "tensorboard", **{name: name for name in PROJECTS}}
"""Logger of another trainer -> tracker."""


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
    """False for a default of the trainer that differs from rlcore's."""


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


def directory(launch: Launch, value: Any) -> Answer:
    """Translate the directory of a run: its last part is the name."""
    head, _, last = str(value).rstrip("/").rpartition("/")
    return to("runs are written to run.directory/run.name", run__directory=head or ".", run__name=last)


def data_set(value: Any, split: Any = None, config: Any = None) -> str:
    """Return the value of data.train: files, or names on the Hugging Face hub, which get a split."""
    names = value if isinstance(value, list) else str(value).split(",")
    end = "".join(f":{part}" for part in (config, split or "train") if part)
    return ",".join(f"{name}{end}" if _HUB_NAME.fullmatch(str(name)) else str(name) for name in names)


def lr_floor(setting: str, peak: str, usual: Any = None) -> Rule:
    """Return a rule for a final learning rate, which is a fraction of the one of the key `peak` here."""

    def rule(launch: Launch, value: Any) -> Answer:
        return Answer("set", ((setting, float(f"{value / launch.get(peak, usual):.6g}")),), f"{value} of {peak}")

    return rule


def tracker_list(names: Sequence[str], project: Any) -> str:
    """Return the value of the setting `trackers`; the project belongs to the trackers that have one."""
    items = [
        f"{{name: {name}, {PROJECTS[name]}: {project}}}" if name in PROJECTS and project else name for name in names
    ]
    return f"[{','.join(items)}]"
