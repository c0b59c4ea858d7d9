"""Translate a launch to settings of rlcore, key by key, without dropping any."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from rlcore.config.compose import PLUGIN_SECTIONS
from rlcore.errors import UserError, did_you_mean
from rlcore_workbench.verl import devices, loss, run
from rlcore_workbench.verl.answer import ACTOR, BATCH, ESTIMATOR, MINI, ROLLOUT, Answer, Line, Rule, available
from rlcore_workbench.verl.checked import Checked, defaults_of
from rlcore_workbench.verl.command import Launch, Unreadable
from rlcore_workbench.verl.keys import ALWAYS, NONE, SAME
from rlcore_workbench.verl.scope import check_algorithm, check_scope

RULES: dict[str, Rule] = {**loss.RULES, **run.RULES, **devices.RULES}
_OLD_NAMES = (
    (r"^(reward|reward_model)\.reward_kwargs\.overlong_buffer_cfg\.", "reward_model.overlong_buffer."),
    (r"^(reward|reward_model)\.reward_kwargs\.max_resp_len$", "reward_model.max_resp_len"),
    (r"reward\.custom_reward_function\.", "custom_reward_function."),
    (r"reward\.reward_manager\.name$", "reward_model.reward_manager"),
    (r"reward\.reward_model\.", "reward_model."),
    (r"\.fsdp\.(param_offload|optimizer_offload)$", r".fsdp_config.\1"),
    (r"^critic\.fsdp_config\.", "critic.model.fsdp_config."),
)
"""Names of keys in other versions of verl, and the name that the tables use."""
DEFAULTS: Mapping[str, Any] = {
    ESTIMATOR: "gae",
    ACTOR + "strategy": "fsdp",
    ACTOR + "clip_ratio": 0.2,
    devices.MEGATRON + "sequence_parallel": True,
    ACTOR + "clip_ratio_c": 3.0,
    ACTOR + "loss_agg_mode": "token-mean",
    ACTOR + "policy_loss.kl_cov_ratio": 0.0002,
    ACTOR + "policy_loss.ppo_kl_coef": 0.1,
    ACTOR + "optim.weight_decay": 0.01,
    BATCH: 1024,
    MINI: 256,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    ROLLOUT + "name": "vllm",
    ROLLOUT + "n": 1,
    ROLLOUT + "gpu_memory_utilization": 0.5,
    ROLLOUT + "tensor_model_parallel_size": 2,
    "algorithm.lam": 1.0,
    "critic.cliprange_value": 0.5,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.total_epochs": 30,
}
"""Defaults of verl that differ from rlcore's."""
_FIXED = (("model.precision", "bfloat16"),)
"""Settings without a key in verl."""
_OWN_FILES = re.compile(r"--config-name=(ppo|dapo)(_megatron)?_trainer(\.yaml)?|--config-path=(\./)?config")
"""Config files of verl and DAPO that DEFAULTS covers."""
DEFAULT_REWARD = "verl.utils.reward_score:default_compute_score"


@dataclass(slots=True)
class Translation:
    """Translation of a launch."""

    lines: list[Line] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def of(self, *hows: str) -> list[Line]:
        """Return the given keys with these kinds of answers."""
        return [line for line in self.lines if line.given and line.answer.how in hows]


def translate(launch: Launch) -> Translation:
    """Translate every key to a line. Settings follow the order of the keys; those of verl's defaults come last.

    Raises:
        ConfigError: rlcore does not have the trainer, algorithm or backend of the launch.
    """
    launch = _renamed(launch)
    check_scope(launch)
    done = Translation()
    sources: dict[str, str] = {}
    for key, text in launch.texts.items():
        _add(done, sources, Line(key, text, answer_of(launch, key)))
    for key, value in DEFAULTS.items():
        if not launch.has(key):
            answer = answer_of(launch, key, value)
            new = tuple(pair for pair in answer.settings if pair[0] not in done.settings)
            if new or answer.how == "partly":
                _add(done, sources, Line(key, str(value), Answer(answer.how, new, answer.note), given=False))
    _add_fixed(done)
    _check(done)
    check_algorithm(done.lines)
    done.remarks += _remarks(launch, done.settings)
    done.lines += [Line(text, "", _other(text)) for text in launch.others]
    return done


def _add_fixed(done: Translation) -> None:
    for setting, value in _FIXED:
        done.settings.setdefault(setting, value)
    if "reward" not in done.settings:
        done.settings["reward"] = DEFAULT_REWARD
        done.remarks.append(
            "reward: verl selects it by the column data_source. The command uses verl's function, so verl must be installed"
            " where rewards run; or write one with the parameters (data_source, solution_str, ground_truth, extra_info)"
        )


def _remarks(launch: Launch, settings: Mapping[str, Any]) -> list[str]:
    """Return remarks for the user to read before running the command."""
    found = list(launch.remarks)
    path = str(settings.get("model.path", ""))
    if "/" in path and not path.startswith(("/", ".", "~", "$")):
        found.append(f"model.path must be a directory, nothing is downloaded:  hf download {path} --local-dir {path}")
    found += [f"{text}: given again later; the later value counts" for text in launch.overridden]
    found += [
        f"the command contains a variable: {name}={value}" for name, value in settings.items() if "$" in str(value)
    ]
    if launch.module and not launch.module.startswith("verl."):
        found.append(f"{launch.module}: its own defaults and config files are unknown, those of verl are used")
    return found


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
    if key in launch.unreadable:
        return Answer("none", note=f"could not be read: {launch.unreadable[key]}")
    try:
        answer = _answer(launch, key, launch.get(key, default))
        if not any(name.startswith("rollout.") for name, _ in answer.settings):
            return answer
        return _for_engine(launch.get(ROLLOUT + "name", DEFAULTS[ROLLOUT + "name"]), answer)
    except Unreadable as error:
        return Answer("none", note=str(error))


def _for_engine(engine: str, answer: Answer) -> Answer:
    """Keep settings only if the engine has them."""
    if engine == "hf":
        return Answer("always", note="the engine hf runs in the trainer's precision and has no such setting")
    if engine not in available("rollout"):
        return Answer("none", note=f"a setting of the engine {engine}, which rlcore does not have")
    return answer


def _answer(launch: Launch, key: str, value: Any) -> Answer:
    if key in RULES:
        try:
            return RULES[key](launch, value)
        except Unreadable:
            raise
        except (TypeError, ValueError, ZeroDivisionError):
            return _unreadable(value)
    if key in SAME:
        setting, written = SAME[key]
        if value is None:
            return Answer("always", note="null: the default")
        try:
            return Answer("set", ((setting, written(value)),))
        except (TypeError, ValueError):
            return Answer("set", ((setting, value),))  # a shell variable, such as $LR
    if key.startswith(run.ENGINE_KWARGS):
        return run.engine_options(launch, key, value)
    if key.startswith(run.CUSTOM + "reward_kwargs."):
        return Answer("set", note="an option of the reward")
    for how, table in (("always", ALWAYS), ("none", NONE)):
        for pattern, note in table.items():
            if fnmatchcase(key, pattern):
                return Answer(how, note=note)  # type: ignore[arg-type]
    hint = did_you_mean(key, [*RULES, *SAME, *ALWAYS])
    return Answer("none", note=f"not in the table of `rlcore migrate`.{hint}")


def _unreadable(value: Any) -> Answer:
    return Answer("none", note=f"{value!r} is not a number; write the number")


def _add(done: Translation, sources: dict[str, str], line: Line) -> None:
    """Add a line. If two keys need different values of one setting, the first one counts and the second is reported."""
    for setting, value in line.answer.settings:
        if setting in done.settings and done.settings[setting] != value:
            note = f"one setting for both keys: {setting} is already {done.settings[setting]}, from {sources[setting]}"
            done.lines.append(Line(line.key, line.value, Answer("none", note=note), line.given))
            return
    for setting, value in line.answer.settings:
        done.settings[setting] = value
        sources.setdefault(setting, line.key)
    done.lines.append(line)


def _check(done: Translation) -> None:
    """Remove settings that rlcore refuses, with the reason, and defaults that the algorithm shares."""
    chosen: dict[str, Any] = {
        section: done.settings[section] for section in PLUGIN_SECTIONS if section in done.settings
    }
    checked = Checked(chosen)
    reasons = checked.offer_all([dict(line.answer.settings) for line in done.lines])
    own = _own_settings(str(chosen.get("algorithm", "")))
    lines = []
    for line, reason in zip(done.lines, reasons, strict=True):
        settings = line.answer.settings
        if reason:
            line = replace(line, answer=Answer("none", note=f"refused by rlcore: {reason}"))
        elif not line.given and settings:
            settings = tuple(pair for pair in settings if pair not in own)
            if not settings:
                continue
            line = replace(line, answer=replace(line.answer, settings=settings))
        lines.append(line)
    done.lines = lines
    done.remarks += checked.remarks
    kept = (
        {setting for line in lines for setting, _ in line.answer.settings} | {name for name, _ in _FIXED} | {"reward"}
    )
    done.settings = {setting: value for setting, value in done.settings.items() if setting in kept}


def _own_settings(algorithm: str) -> list[tuple[str, Any]]:
    try:
        return [(f"algorithm.{name}", value) for name, value in defaults_of("algorithm", algorithm).items()]
    except UserError:
        return []  # not installed, which `Checked` reports


def _renamed(launch: Launch) -> Launch:
    """Return the launch with the names that the tables use."""

    def known(key: str) -> str:
        for pattern, name in _OLD_NAMES:
            key = re.sub(pattern, name, key)
        return key

    settings = {known(key): value for key, value in launch.settings.items()}
    texts = {known(key): text for key, text in launch.texts.items()}
    unreadable = {known(key): reason for key, reason in launch.unreadable.items()}
    return replace(launch, settings=settings, texts=texts, unreadable=unreadable)
