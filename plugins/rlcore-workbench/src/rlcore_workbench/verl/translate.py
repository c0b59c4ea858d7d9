"""Translate a launch of verl to settings of rlcore."""

from __future__ import annotations

import re
from typing import Any

from rlcore_workbench.migration.answer import Answer, Line, Rule, available
from rlcore_workbench.migration.launch import Launch, Unreadable
from rlcore_workbench.migration.table import Table, read_table
from rlcore_workbench.migration.translation import Translation, answer_for, translate_keys
from rlcore_workbench.verl import devices, loss, run, schedule
from rlcore_workbench.verl.names import ROLLOUT
from rlcore_workbench.verl.scope import check_algorithm, check_scope

RULES: dict[str, Rule] = {**loss.RULES, **run.RULES, **devices.RULES, **schedule.RULES}
_TABLES = {name: f"verl_{name}" for name in ("sft", "generation", "async", "one_step")}
_PASSED = {
    r"data\.apply_chat_template_kwargs\.": "data.chat_template_kwargs.",
    r"actor_rollout_ref\.model\.override_config\.(model_config\.)?(?!\w*(drop|attn_impl|moe_config))": "model.overrides.",
    r"distillation\.teacher_models?(\.\w+)?\.model_path$": "algorithm.teacher",
}
"""Beginning of keys -> setting."""
_OWN_FILES = re.compile(
    r"--config-name=(ppo|dapo|fully_async_ppo|one_step_off_ppo)(_megatron)?_trainer(\.yaml)?|--config-path=(\./)?config"
)
"""Config files of verl and DAPO whose defaults the tables cover."""
DEFAULT_REWARD = "verl.utils.reward_score:default_compute_score"


def table_of(launch: Launch) -> Table:
    """Return the table of the trainer that the launch runs."""
    return read_table(_TABLES.get(launch.trainer, "verl"))


def translate(launch: Launch) -> Translation:
    """Translate every key to a line.

    Raises:
        ConfigError: rlcore does not have the trainer, algorithm or backend of the launch.
    """
    table = table_of(launch)
    launch = launch.renamed(table.known)
    check_scope(launch)
    done = translate_keys(launch, table, answer_of)
    _add_reward(done)
    done.check()
    check_algorithm(done.lines)
    _choose_command(done, launch)
    if launch.module and not launch.module.startswith("verl."):
        done.remarks.append(f"{launch.module}: its own defaults and config files are unknown, those of verl are used")
    done.lines += [Line(text, "", _other(text)) for text in launch.others]
    return done


def _add_reward(done: Translation) -> None:
    if "reward" not in done.settings and done.settings.get("algorithm") not in ("sft", "distillation"):
        done.settings["reward"] = DEFAULT_REWARD
        done.remarks.append(
            "reward: verl selects it by the column data_source. The command uses verl's function, so verl must be installed"
            " where rewards run; or write one with the parameters (data_source, solution_str, ground_truth, extra_info)"
        )


def _choose_command(done: Translation, launch: Launch) -> None:
    """Choose another command than `rlcore train` for a launch that does not train; its model is an argument."""
    if launch.trainer == "generation":
        done.command = ("rlcore", "rollout", done.settings.pop("model.path", "DIR"), _samples(launch))
    elif launch.settings.get("trainer.val_only"):
        done.command = ("rlcore", "eval", done.settings.pop("model.path", "DIR"))


def _samples(launch: Launch) -> str:
    """Return the directory for generated samples."""
    return str(launch.settings.get("data.output_path", "samples")).removesuffix(".parquet")


def _other(text: str) -> Answer:
    if text.startswith("~"):
        return Answer("none", note="removes a setting; leave out its counterpart here")
    if _OWN_FILES.fullmatch(text):
        return Answer("always", note="a config file of verl, whose defaults are known")
    if text.startswith("--config"):
        return Answer("none", note="settings in this config file are not read; give them as key=value")
    if text.startswith("$"):
        return Answer("none", note="the script does not set this variable, so its content is not translated")
    return Answer("none", note="not a setting of verl")


def answer_of(launch: Launch, key: str, default: Any = None) -> Answer:
    """Return the answer for one key; `default` is its value if the launch does not give it."""
    rules = RULES
    if key.startswith(run.ENGINE_KWARGS):
        rules = {key: lambda launch, value: run.engine_options(launch, key, value)}
    elif key.startswith(run.CUSTOM + "reward_kwargs."):
        rules = {key: lambda launch, value: Answer("set", note="an option of the reward")}
    elif passed := _passed(key):
        rules = {key: lambda launch, value: Answer("set", ((passed, value),))}
    answer = answer_for(launch, key, default, rules, table_of(launch))
    if not any(name.startswith("rollout.") for name, _ in answer.settings):
        return answer
    try:
        return _for_engine(launch, answer)
    except Unreadable as error:
        return Answer("none", note=str(error))


def _passed(key: str) -> str:
    """Return the setting for a key that has the names of another configuration after a fixed beginning."""
    found = (re.sub(f"^{pattern}", setting, key) for pattern, setting in _PASSED.items())
    return next((setting for setting in found if setting != key), "")


def _for_engine(launch: Launch, answer: Answer) -> Answer:
    """Keep settings only if the engine has them."""
    engine = launch.get(ROLLOUT + "name", "vllm")
    if engine == "hf":
        return Answer("always", note="the engine hf runs in the trainer's precision and has no such setting")
    if engine not in available("rollout"):
        return Answer("none", note=f"a setting of the engine {engine}, which rlcore does not have")
    return answer
