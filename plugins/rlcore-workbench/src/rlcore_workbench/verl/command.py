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
_SETTING = re.compile(rf"[+~]*((?:{'|'.join(ROOTS)})(?:\.[\w@-]+)+)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_USE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")


@dataclass(slots=True)
class Launch:
    """The settings of a launch command, in their order."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Key -> parsed value; the last one of a key counts, as it does there."""
    texts: dict[str, str] = field(default_factory=dict)
    """Key -> value as typed, with the shell's variables filled in."""
    others: list[str] = field(default_factory=list)
    """Arguments of the command that are no settings, such as --config-name."""
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
    launch, after_module = Launch(), False
    variables: dict[str, str] = {}
    for raw in (part for word in words for part in _without_brackets(word)):
        word = expand(raw, variables)
        if setting := _SETTING.fullmatch(word):
            key, value = setting[1], setting[2]
            if key in launch.settings:
                launch.overridden.append(f"{key}={launch.texts[key]}")
            launch.settings[key], launch.texts[key] = parse_value(value), value
        elif (variable := _VARIABLE.fullmatch(word)) and not after_module:
            variables[variable[1]] = variable[2]
        elif after_module and (word.startswith("--") or "=" in word):
            launch.others.append(word)
        after_module = after_module or word.startswith("verl.trainer.")
    if not launch.settings:
        raise ConfigError(
            "no setting such as data.train_files=… is in it\n"
            "Type  rlcore migrate 'python3 -m verl.trainer.main_ppo data.train_files=… …'   or the path of a script."
        )
    return launch


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


def _without_brackets(word: str) -> list[str]:
    """Array assignments, DATA=( key=value … ), hold settings too."""
    name = re.match(r"[A-Za-z_]\w*=\(", word)
    word = word[name.end() :] if name else word
    return [part for part in [word.removeprefix("(").removesuffix(")") if name or word.endswith(")") else word] if part]
