"""From a launch to settings of rlcore, key by key; nothing is dropped."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from rlcore.errors import UserError, did_you_mean
from rlcore_workbench.verl import loss, run
from rlcore_workbench.verl.accepted import SECTION, Accepted, of_algorithm
from rlcore_workbench.verl.answer import ACTOR, BATCH, ESTIMATOR, MINI, ROLLOUT, Answer, Rule
from rlcore_workbench.verl.command import Launch
from rlcore_workbench.verl.keys import ALWAYS, NONE, SAME

RULES: dict[str, Rule] = {**loss.RULES, **run.RULES}
_OLD_NAMES = (
    (r"reward\.custom_reward_function\.", "custom_reward_function."),
    (r"reward\.reward_manager\.name$", "reward_model.reward_manager"),
    (r"reward\.reward_model\.", "reward_model."),
    (r"\.fsdp\.(param_offload|optimizer_offload)$", r".fsdp_config.\1"),
    (r"^critic\.fsdp_config\.", "critic.model.fsdp_config."),
)
"""One thing under several names, as its versions had them."""
DEFAULTS: Mapping[str, Any] = {
    ESTIMATOR: "gae",
    ACTOR + "strategy": "fsdp",
    ACTOR + "clip_ratio": 0.2,
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
"""What verl does when nothing is said, where rlcore does something else."""
_FIXED = (("model.precision", "bfloat16"),)
"""Always so there."""
DEFAULT_REWARD = "verl.utils.reward_score:default_compute_score"


@dataclass(frozen=True, slots=True)
class Line:
    """One key of the launch and what became of it."""

    key: str
    value: str
    answer: Answer
    given: bool = True
    """False for a default of verl that rlcore does not share."""


@dataclass(slots=True)
class Translation:
    """The whole launch in rlcore's words."""

    lines: list[Line] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def of(self, *hows: str) -> list[Line]:
        """The given keys with these answers."""
        return [line for line in self.lines if line.given and line.answer.how in hows]


def translate(launch: Launch) -> Translation:
    """Every key gets its line; settings come in the order of the keys, then those of verl's defaults."""
    launch = _renamed(launch)
    done = Translation()
    sources: dict[str, str] = {}
    for key, value in launch.settings.items():
        _add(done, sources, Line(key, launch.texts[key], answer_of(launch, key, value)))
    for key, value in DEFAULTS.items():
        if key not in launch.settings and not (
            key.startswith(ROLLOUT + "gpu") and launch.get(ROLLOUT + "name") == "hf"
        ):
            answer = answer_of(launch, key, value)
            new = tuple(pair for pair in answer.settings if pair[0] not in done.settings)
            if new or answer.how == "partly":
                _add(done, sources, Line(key, str(value), Answer(answer.how, new, answer.note), given=False))
    _ask_the_algorithm(done)
    for setting, value in _FIXED:
        done.settings.setdefault(setting, value)
    if "reward" not in done.settings:
        done.settings["reward"] = DEFAULT_REWARD
        done.remarks.append(
            "reward: verl chooses by the column data_source. Its own function is taken, which needs verl installed where"
            " rewards are scored; or write one with the parameters (data_source, solution_str, ground_truth, extra_info)"
        )
    if "/" in str(launch.get("actor_rollout_ref.model.path", "")) and not str(done.settings["model.path"]).startswith(
        ("/", ".", "~", "$")
    ):
        path = done.settings["model.path"]
        done.remarks.append(f"model.path is a directory; nothing is downloaded:  hf download {path} --local-dir {path}")
    done.remarks += [f"{text}: given again later, and the later one counts" for text in launch.overridden]
    done.remarks += [f"variable not known here: {text}" for text in _unknown_variables(done.settings)]
    if launch.module and not launch.module.startswith("verl."):
        done.remarks.append(f"{launch.module}: its own defaults and config files are not known here, verl's are taken")
    done.lines += [Line(text, "", Answer("none", note=_other(text))) for text in launch.others]
    return done


def _other(text: str) -> str:
    if text.startswith("~"):
        return "removes a setting there; leave out the setting that it had become here"
    if text.startswith("--config"):
        return "what this config file sets is not read: give it as key=value"
    return "no setting of verl"


def answer_of(launch: Launch, key: str, value: Any) -> Answer:
    """What becomes of one key."""
    answer = _answer(launch, key, value)
    if launch.get(ROLLOUT + "name") == "hf" and any(name.startswith("rollout.") for name, _ in answer.settings):
        return Answer("always", note="the engine hf runs in the trainer's precision and has no such setting")
    return answer


def _answer(launch: Launch, key: str, value: Any) -> Answer:
    if key in RULES:
        try:
            return RULES[key](launch, value)
        except (TypeError, ValueError, ZeroDivisionError):
            return _unreadable(value)
    if key in SAME:
        setting, written = SAME[key]
        if value is None:
            return Answer("always", note="null: the default")
        try:
            return Answer("set", ((setting, written(value)),))
        except (TypeError, ValueError):
            return Answer("set", ((setting, value),))  # a variable of the shell, such as $LR
    if key.startswith(run.CUSTOM + "reward_kwargs."):
        return Answer("set", note="an option of the reward")
    for how, table in (("always", ALWAYS), ("none", NONE)):
        for pattern, note in table.items():
            if fnmatchcase(key, pattern):
                return Answer(how, note=note)  # type: ignore[arg-type]
    hint = did_you_mean(key, [*RULES, *SAME, *ALWAYS])
    return Answer("none", note=f"not in the table of `rlcore migrate`.{hint}")


def _unreadable(value: Any) -> Answer:
    return Answer("none", note=f"{value!r} cannot be computed with; give the number itself")


def _add(done: Translation, sources: dict[str, str], line: Line) -> None:
    """A setting that two keys want differently is the first one's; the second key says so."""
    for setting, value in line.answer.settings:
        if setting in done.settings and done.settings[setting] != value:
            note = f"{setting} is {done.settings[setting]} already, from {sources[setting]}; there is one for both"
            done.lines.append(Line(line.key, line.value, Answer("none", note=note), line.given))
            return
    for setting, value in line.answer.settings:
        done.settings[setting] = value
        sources.setdefault(setting, line.key)
    done.lines.append(line)


def _ask_the_algorithm(done: Translation) -> None:
    """What it refuses is taken back and told; a default of verl that is its own, too, needs no word."""
    name = done.settings.get("algorithm", "grpo")
    try:
        algorithm = Accepted(name)
    except UserError as error:
        done.remarks.append(f"the settings of algorithm {name} have not been checked: {str(error).splitlines()[0]}")
        return
    reasons = algorithm.offer_all([of_algorithm(line.answer.settings) for line in done.lines])
    lines = []
    for line, reason in zip(done.lines, reasons, strict=True):
        settings, own = line.answer.settings, of_algorithm(line.answer.settings)
        if reason:
            settings = tuple(pair for pair in settings if pair[0].removeprefix(SECTION) not in own)
            note = f"algorithm={name} refuses it: {reason}"
            line = replace(line, answer=Answer("partly" if settings else "none", settings, note))
        elif not line.given and own:
            settings = tuple(pair for pair in settings if algorithm.own.get(pair[0].removeprefix(SECTION)) != pair[1])
            if not settings:
                continue
            line = replace(line, answer=replace(line.answer, settings=settings))
        lines.append(line)
    done.lines = lines
    kept = {setting for line in lines for setting, _ in line.answer.settings}
    done.settings = {setting: value for setting, value in done.settings.items() if setting in kept}


def _renamed(launch: Launch) -> Launch:
    """The launch under the names that the tables know."""
    names = {}
    for key in launch.settings:
        name = key
        for pattern, known in _OLD_NAMES:
            name = re.sub(pattern, known, name)
        names[key] = name
    settings = {names[key]: value for key, value in launch.settings.items()}
    return replace(launch, settings=settings, texts={names[key]: text for key, text in launch.texts.items()})


def _unknown_variables(settings: Mapping[str, Any]) -> list[str]:
    return [f"{name}={value}" for name, value in settings.items() if "$" in str(value)]
