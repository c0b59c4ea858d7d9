"""Read a launch command, or a shell script that holds one, into its settings. Nothing of it is run."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from typing import Any

from rlcore.errors import ConfigError

ROOTS = (
    "actor_rollout_ref",
    "algorithm",
    "critic",
    "custom_reward_function",
    "data",
    "distillation",
    "global_profiler",
    "model_engine",
    "ray_init",
    "ray_kwargs",
    "reward",
    "reward_model",
    "trainer",
    "transfer_queue",
)
"""First parts of keys; what else looks like NAME=VALUE in a script is a variable of the shell."""
_SETTING = re.compile(rf"\+*((?:{'|'.join(ROOTS)})(?:\.[\w@-]+)+)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_FOREIGN = re.compile(r"\+*[A-Za-z_][\w@/-]*(?:\.[\w@/-]+)+=.*|~[A-Za-z_].*", re.DOTALL)
"""A setting that is none of verl's, or the removal of one; no variable of a shell looks like that."""
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=\(")
"""Where an array of the shell begins; arrays hold settings, too."""
_USE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")


@dataclass(slots=True)
class Launch:
    """The settings of a launch command, in their order."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Key -> parsed value; the last one of a key counts, as it does there."""
    texts: dict[str, str] = field(default_factory=dict)
    """Key -> value as typed, with the shell's variables filled in."""
    others: list[str] = field(default_factory=list)
    """Arguments of the command that are no settings of verl: --config-name=x, hydra.run.dir=x, ~trainer.logger."""
    module: str = ""
    """The module or file that the command runs."""
    overridden: list[str] = field(default_factory=list)
    """Settings, as typed, that a later one of the same key replaces."""

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, or what it is when nobody gives it."""
        return self.settings.get(key, default)


def read_launch(text: str) -> Launch:
    """Read the settings of a command or script.

    Raises:
        ConfigError: quotes that do not close, or no setting at all.
    """
    joined = re.sub(r"\\\r?\n", " ", text)
    try:
        words = shlex.split(joined, comments=True)
    except ValueError as error:
        raise ConfigError(
            f"the command cannot be read: {error}\nQuote it as a whole, or give the script's file."
        ) from None
    launch, before = Launch(), ""
    variables: dict[str, str] = {}
    programs, in_array = [_Program("")], False
    for word in words:
        if before == "-m" or word.endswith(".py"):
            programs.append(_Program(word))
        before = word
        if opened := _ARRAY.match(word):
            word, in_array = word[opened.end() :], True
        end = in_array and word.endswith(")")
        _read(
            expand(word[:-1] if end else word, variables), launch, variables, programs[0 if in_array else -1], in_array
        )
        in_array = in_array and not end
    own = [program for program in programs[1:] if program.settings] or programs[1:][-1:]
    launch.others = [word for program in [programs[0], *own] for word in program.others]
    launch.module = own[-1].name if own else ""
    if not launch.settings:
        raise ConfigError(
            "no setting such as data.train_files=… is in it\n"
            "Type  rlcore migrate 'python3 -m verl.trainer.main_ppo data.train_files=… …'   or the path of a script."
        )
    return launch


@dataclass(slots=True)
class _Program:
    """What one command of a script says; the one without a name: what stands before any, and in arrays."""

    name: str
    settings: int = 0
    others: list[str] = field(default_factory=list)


def _read(word: str, launch: Launch, variables: dict[str, str], program: _Program, in_array: bool) -> None:
    """One word of the script: a setting, a variable, or an argument of the program."""
    if setting := _SETTING.fullmatch(word):
        key, value = setting[1], setting[2]
        if key in launch.settings:
            launch.overridden.append(f"{key}={launch.texts[key]}")
        launch.settings[key], launch.texts[key] = parse_value(value), value
        program.settings += not in_array
        return
    if variable := _VARIABLE.fullmatch(word):
        variables[variable[1]] = variable[2]
    begun = in_array or program.name or program.settings
    if begun and (_FOREIGN.fullmatch(word) or word.startswith("--") or "=" in word):
        program.others.append(word)


def expand(text: str, variables: dict[str, str]) -> str:
    """Fill in the variables that the script has set, and defaults as in ${NAME:-default}; others stay as they are."""

    def value(use: re.Match[str]) -> str:
        name = use[1] or use[3]
        return variables.get(name, use[0] if use[2] is None else use[2])

    return _USE.sub(value, text)


def parse_value(text: str) -> Any:
    """A value as Hydra reads it: True, 3, 1e-6, null, [a,b], text with or without quotes."""
    text = text.strip()
    if text[:1] in "'\"" and text[-1:] == text[:1] and len(text) > 1:
        return text[1:-1]
    if text[:1] == "[" and text[-1:] == "]":
        return [parse_value(part) for part in text[1:-1].split(",") if part.strip()]
    if text.lower() in ("true", "false", "null", "none"):
        return {"true": True, "false": False}.get(text.lower())
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
