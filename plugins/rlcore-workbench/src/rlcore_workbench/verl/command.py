"""Read the settings of a verl launch."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rlcore.errors import ConfigError
from rlcore_workbench.migration.launch import Launch, parse_value
from rlcore_workbench.migration.programs import Program, only_one, programs
from rlcore_workbench.migration.shell import read_commands
from rlcore_workbench.migration.words import Word

TRAINER = "verl.trainer.main_ppo"
EXAMPLE = f"python3 -m {TRAINER} key=value …"
_TRAINERS = {
    "ppo": r"verl\.trainer\.main_ppo(_sync)?|(.*/)?verl/trainer/main_ppo\.py|(recipe\.)?dapo\.main_dapo"
    r"|(recipe\.)?dapo\.dapo_transfer_queue\.main_dapo|(recipe\.)?entropy\.main_entropy|(recipe\.)?gvpo\.gvpo_main_ppo",
    "sft": r"(.*[./])?(fsdp_)?sft_trainer(\.py)?",
    "generation": r"(.*[./])?main_generation(_server)?(\.py)?",
    "async": r"(.*\.)?fully_async_main",
    "one_step": r"(.*\.)?one_step_off_policy\.main_ppo",
}
"""Trainer -> programs that run it. DAPO and entropy are main_ppo with other defaults."""
_ROOTS = (
    "actor_rollout_ref|algorithm|async_training|checkpoint|critic|custom_reward_function|data|distillation|engine"
    "|global_profiler|model|optim|ray_init|ray_kwargs|reward|reward_model|rollout|trainer|transfer_queue"
)
_PLAIN = "engine|model|model_engine|optim|ulysses_sequence_parallel_size|use_remove_padding"
"""Keys without a dot."""
_SETTING = re.compile(rf"\+*((?:{_ROOTS})(?:\.[\w@-]+)+|{_PLAIN})=(.*)", re.DOTALL)
_KEY = re.compile(r"(?:--|\+*)[A-Za-z_][\w@/-]*(?:\.[\w@/-]+)*=")
_FOREIGN = re.compile(r"\+*[A-Za-z_][\w@/-]*(?:\.[\w@/-]+)+=.*|~[A-Za-z_].*", re.DOTALL)
"""Setting of something other than verl, or the removal of a setting."""
_CONFIG_FLAGS = {
    "-cn": "--config-name",
    "-cp": "--config-path",
    **{it: it for it in ("--config-name", "--config-path")},
}
"""Flags of Hydra whose value is the next word."""


def read_launch(text: str) -> Launch:
    """Read the settings of a command or script.

    Raises:
        ConfigError: the text is not valid shell syntax, does not contain exactly one launch of a trainer of verl, or
            has an argument that cannot be read.
    """
    commands, remarks = read_commands(text)
    return launch_of(programs(commands), remarks)


def launch_of(found: Sequence[Program], remarks: Sequence[str] = ()) -> Launch:
    """Read the one launch among the programs of a script. Raises ConfigError as `read_launch` does."""
    chosen = _chosen([it for it in found if any(_SETTING.fullmatch(word.text) for word in it.arguments)])
    launch = Launch(module=chosen.name, trainer=trainer_of(chosen.name), remarks=list(remarks))
    for word in chosen.arguments:
        _read(word, launch, chosen)
    return launch


def trainer_of(program: str) -> str:
    """Return the trainer that a program runs; empty if it is not one of verl's."""
    if not program:
        return "ppo"
    return next((name for name, pattern in _TRAINERS.items() if re.fullmatch(pattern, program)), "")


def _chosen(launches: Sequence[Program]) -> Program:
    """Return the one launch of a trainer of verl."""
    if not launches:
        raise ConfigError(
            "no launch found: neither a setting of verl, such as data.train_files=…, nor TRL, OpenRLHF or prime-rl\n"
            f"Type  rlcore migrate '{EXAMPLE}'   or the path of a script."
        )
    stray = [launch for launch in launches if not launch.name]
    if stray and len(stray) < len(launches):
        raise ConfigError(
            f"line {stray[0].line} begins with {stray[0].arguments[0].text}, but the command before it has already ended\n"
            "End each line of the launch with a backslash as the last character, without comments in between."
        )
    ours = [launch for launch in launches if trainer_of(launch.name)]
    if not ours:
        raise ConfigError(
            f"line {launches[0].line} runs {launches[0].name}, which is not a trainer of verl that is translated\n"
            f"If it takes the settings of {TRAINER}, type  rlcore migrate '{EXAMPLE}'"
        )
    return only_one(ours, EXAMPLE)


def _read(word: Word, launch: Launch, found: Program) -> None:
    """Read one argument: a setting, or something else of the program."""
    text = re.sub("[\"']", "", word.text) if word.unreadable else word.text
    if setting := _SETTING.fullmatch(text):
        launch.put(setting[1], setting[2], None if word.unreadable else parse_value(setting[2]), word.unreadable)
    elif word.unreadable:
        if not _KEY.match(text):
            raise ConfigError(
                f"line {found.line}: the argument {word.text} could not be read: {word.unreadable}\n"
                f"Type  rlcore migrate 'python3 -m {found.name or TRAINER} key=value …'   with the value written out."
            )
        launch.others.append(word.text)
    elif launch.others and launch.others[-1] in _CONFIG_FLAGS:
        launch.others[-1] = f"{_CONFIG_FLAGS[launch.others[-1]]}={word.text}"
    elif found.name or _FOREIGN.fullmatch(word.text) or word.text.startswith("--"):
        launch.others.append(word.text)
