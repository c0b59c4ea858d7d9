"""Read the settings of a launch command, or of a shell script that contains one, without running it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlcore.errors import ConfigError
from rlcore_workbench.verl.shell import Command, read_commands
from rlcore_workbench.verl.words import Word

_ROOTS = (
    "actor_rollout_ref",
    "algorithm",
    "critic",
    "custom_reward_function",
    "data",
    "distillation",
    "global_profiler",
    "ray_init",
    "ray_kwargs",
    "reward",
    "reward_model",
    "trainer",
    "transfer_queue",
)
OTHER_ROOTS = ("async_training", "engine", "model", "optim", "rollout")
"""Roots of keys that only verl's other trainers have: asynchronous training and supervised fine-tuning."""
TRAINER = "verl.trainer.main_ppo"
_TRAINERS = re.compile(r"verl\.trainer\.main_ppo|(.*/)?verl/trainer/main_ppo\.py|(recipe\.)?dapo\.main_dapo")
"""Programs whose launches are translated: the PPO/GRPO trainer, and DAPO, the same trainer with other defaults."""
_SFT = re.compile(r"(^|[._/])(fsdp_)?sft_trainer\w*(\.py)?$")
_SETTING = re.compile(rf"\+*((?:{'|'.join(_ROOTS + OTHER_ROOTS)})(?:\.[\w@-]+)+|model_engine)=(.*)", re.DOTALL)
_KEY = re.compile(r"(?:--|\+*)[A-Za-z_][\w@/-]*(?:\.[\w@/-]+)*=")
_FOREIGN = re.compile(r"\+*[A-Za-z_][\w@/-]*(?:\.[\w@/-]+)+=.*|~[A-Za-z_].*", re.DOTALL)
"""Setting of something other than verl, or the removal of a setting."""
_CONFIG_FLAGS = {
    "--config-name": "--config-name",
    "-cn": "--config-name",
    "--config-path": "--config-path",
    "-cp": "--config-path",
}
"""Flags of Hydra whose value is the next word."""
_NO_LAUNCH = ("echo", "printf", "export")


class Unreadable(ValueError):
    """Error of a rule that needs a key whose value could not be read."""


@dataclass(slots=True)
class Launch:
    """Settings of a launch command, in order."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Key -> parsed value; the last value of a key counts, as in Hydra."""
    texts: dict[str, str] = field(default_factory=dict)
    """Key -> value as typed, with the script's variables filled in. Includes keys that could not be read."""
    unreadable: dict[str, str] = field(default_factory=dict)
    """Key -> reason why its value could not be read."""
    others: list[str] = field(default_factory=list)
    """Arguments of the command that are not settings of verl: --config-name=x, hydra.run.dir=x, ~trainer.logger."""
    module: str = ""
    """Module or file that the command runs."""
    overridden: list[str] = field(default_factory=list)
    """Settings, as typed, that a later one of the same key replaces."""
    remarks: list[str] = field(default_factory=list)
    """Decisions of the reader about the script."""

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or `default` if it is not given.

        Raises:
            Unreadable: the key is given, but its value could not be read.
        """
        if key in self.unreadable:
            raise Unreadable(f"needs {key}, whose value could not be read: {self.unreadable[key]}")
        return self.settings.get(key, default)

    def text(self, key: str, default: str = "") -> str:
        """Return the value of a key as typed. Raises as `get` does."""
        self.get(key)
        return self.texts.get(key, default)

    def has(self, key: str) -> bool:
        """Return whether the key is given, readable or not."""
        return key in self.texts


def read_launch(text: str) -> Launch:
    """Read the settings of a command or script.

    Raises:
        ConfigError: the text is not valid shell syntax, does not contain exactly one launch of the PPO trainer, or
            has an argument that cannot be read.
    """
    commands, remarks = read_commands(text)
    launches = [_split(command) for command in commands if not _starts_with(command, _NO_LAUNCH)]
    found = _chosen([launch for launch in launches if launch.holds_settings()])
    launch = Launch(module=found.program, remarks=remarks)
    for word in found.arguments:
        _read(word, launch, found)
    return launch


@dataclass(frozen=True, slots=True)
class _Found:
    """Command that may be a launch."""

    program: str
    arguments: tuple[Word, ...]
    line: int

    def holds_settings(self) -> bool:
        """Return whether an argument is a setting of verl."""
        return any(_SETTING.fullmatch(word.text) for word in self.arguments)


def _starts_with(command: Command, names: Sequence[str]) -> bool:
    return bool(command.words) and command.words[0].text in names


def _split(command: Command) -> _Found:
    """Find the program in a command. Words before it, such as torchrun, uv or ray, are not part of the launch."""
    words = command.words
    for i, word in enumerate(words):
        if i and words[i - 1].text == "-m":
            return _Found("an unknown module" if word.unreadable else word.text, words[i + 1 :], command.line)
        if word.text.endswith(".py") and "=" not in word.text and not word.unreadable:
            return _Found(word.text, words[i + 1 :], command.line)
    bare = not words or _is_setting(words[0].text)
    return _Found("" if bare else words[0].text, words, command.line)


def _is_setting(text: str) -> bool:
    return bool(_SETTING.fullmatch(text) or _FOREIGN.fullmatch(text))


def _chosen(launches: Sequence[_Found]) -> _Found:
    """Return the one launch of the PPO trainer."""
    ours = [launch for launch in launches if not launch.program or _TRAINERS.fullmatch(launch.program)]
    if not launches:
        raise ConfigError(
            "no setting of verl found, such as data.train_files=…\n"
            "Type  rlcore migrate 'python3 -m verl.trainer.main_ppo data.train_files=… …'   or the path of a script."
        )
    stray = [launch for launch in launches if not launch.program]
    if stray and len(stray) < len(launches):
        raise ConfigError(
            f"line {stray[0].line} begins with {stray[0].arguments[0].text}, but the command before it has already ended\n"
            "End each line of the launch with a backslash as the last character, without comments in between."
        )
    if not ours:
        raise _refusal(launches[0])
    if any(launch.arguments != ours[0].arguments for launch in ours):
        lines = ", ".join(str(launch.line) for launch in ours)
        raise ConfigError(
            f"found {len(ours)} different launches, at lines {lines}\n"
            "Type  rlcore migrate 'python3 -m verl.trainer.main_ppo key=value …'   with the settings of one of them."
        )
    return ours[0]


def _refusal(launch: _Found) -> ConfigError:
    first = f"line {launch.line} runs {launch.program}, and only {TRAINER} and recipe.dapo.main_dapo are translated"
    if _SFT.search(launch.program):
        return ConfigError(
            f"{first}\nSupervised fine-tuning here:  rlcore train algorithm=sft backend=fsdp model.path=DIR data.train=FILE"
            "   with the columns prompt and response in the file"
        )
    return ConfigError(
        f"{first}\nIf it takes the settings of {TRAINER}, type  rlcore migrate 'python3 -m {TRAINER} key=value …'"
    )


def _read(word: Word, launch: Launch, found: _Found) -> None:
    """Read one argument: a setting, or something else of the program."""
    text = re.sub("[\"']", "", word.text) if word.unreadable else word.text
    if setting := _SETTING.fullmatch(text):
        _set(launch, setting[1], setting[2], word.unreadable)
    elif word.unreadable:
        if not _KEY.match(text):
            raise ConfigError(
                f"line {found.line}: the argument {word.text} could not be read: {word.unreadable}\n"
                f"Type  rlcore migrate 'python3 -m {found.program or TRAINER} key=value …'   with the value written out."
            )
        launch.others.append(word.text)
    elif launch.others and launch.others[-1] in _CONFIG_FLAGS:
        launch.others[-1] = f"{_CONFIG_FLAGS[launch.others[-1]]}={word.text}"
    elif found.program or _FOREIGN.fullmatch(word.text) or word.text.startswith("--"):
        launch.others.append(word.text)


def _set(launch: Launch, key: str, text: str, unreadable: str) -> None:
    if launch.has(key):
        launch.overridden.append(f"{key}={launch.texts.pop(key)}")
        launch.settings.pop(key, None)
        launch.unreadable.pop(key, None)
    launch.texts[key] = text
    if unreadable:
        launch.unreadable[key] = unreadable
    else:
        launch.settings[key] = parse_value(text)


def parse_value(text: str) -> Any:
    """Parse a value as Hydra does: True, 3, 1e-6, null, [a,b], text with or without quotes."""
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
