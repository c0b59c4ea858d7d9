"""TRL's GRPO trainer: `GRPOConfig(…)` in a Python file, which is not executed, and `trl grpo` with flags or a YAML file."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlcore.errors import ConfigError
from rlcore_workbench.migration.answer import TRACKERS, Answer, Rule, data_set, directory, lr_floor, to, tracker_list
from rlcore_workbench.migration.flags import read_flags
from rlcore_workbench.migration.launch import Launch, known, read_text
from rlcore_workbench.migration.programs import Program
from rlcore_workbench.migration.python import PythonFile, source
from rlcore_workbench.migration.table import read_table
from rlcore_workbench.migration.translation import Translation, answer_for, translate_keys
from rlcore_workbench.migration.words import literal

_EXAMPLE = (
    "Type  rlcore migrate FILE.py   with a file that calls GRPOConfig, or  rlcore migrate 'trl grpo --config FILE'"
)
_CALLS: dict[str, tuple[list[str], dict[str, str]]] = {
    "GRPOConfig": (["output_dir"], {}),
    "LoraConfig": (["task_type"], {"r": "lora_r", "target_modules": "lora_target_modules"}),
    "GRPOTrainer": (
        ["model", "reward_funcs", "args", "train_dataset", "eval_dataset"],
        {"model": "model_name_or_path", "train_dataset": "dataset_name"},
    ),
}
"""Function -> names of its positional arguments, and the names that `trl grpo` has for some of its arguments."""


def is_launch(found: Program) -> bool:
    """Return whether a program is `trl grpo`, or a script for GRPO that takes its flags."""
    first = found.arguments[0].text if found.arguments else ""
    return (found.name == "trl" and first == "grpo") or (found.name.endswith(".py") and "grpo" in found.name)


def read_command(found: Program) -> Launch:
    """Read the flags; those of the file that `--config` names come first."""
    launch = read_flags(found, "grpo")
    launch.others = [text for text in launch.others if text != "grpo"]
    if not launch.has("config"):
        return launch
    merged = read_yaml(Path(known(launch, "config")))
    for key, text in launch.texts.items():
        if key != "config":
            merged.put(key, text, launch.settings.get(key), launch.unreadable.get(key, ""))
    merged.others = launch.others
    return merged


def read_yaml(path: Path) -> Launch:
    """Read a file of arguments. Raises ConfigError if it cannot be read or is not a mapping."""
    import yaml  # type: ignore[import-untyped]

    try:
        content = yaml.safe_load(read_text(path, _EXAMPLE))
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date or a number out of range
        raise ConfigError(f"{path} is not valid YAML: {error}\n{_EXAMPLE}") from error
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path} is not a mapping of arguments, so it has no launch\n{_EXAMPLE}")
    launch = Launch(trainer="grpo")
    for key, value in content.items():
        launch.put(str(key), str(value), value, literal(str(value)))
    return launch


def read_python(path: Path, text: str) -> Launch:
    """Read the arguments of GRPOConfig, GRPOTrainer and LoraConfig from the syntax tree of a file.

    Raises:
        ConfigError: the file is not valid Python, or does not contain exactly one GRPOConfig.
    """
    file = PythonFile(path, text, _EXAMPLE)
    configs = [call.lineno for call in file.calls("GRPOConfig")]
    if len(configs) != 1:
        where = (
            f"{len(configs)} calls of GRPOConfig, at lines {', '.join(map(str, configs))}" if configs else "no launch"
        )
        raise ConfigError(f"{path} has {where}, not one call of GRPOConfig\n{_EXAMPLE}")
    launch = Launch(module=str(path), trainer="grpo")
    for function, (positions, renamed) in _CALLS.items():
        for call in file.calls(function):
            if function == "LoraConfig":
                launch.put("use_peft", function, function)
            given = [*zip(positions, call.args, strict=False), *((it.arg, it.value) for it in call.keywords)]
            for name, node in [*given, *file.assigned_to(call)]:
                if name != "args":
                    _put(launch, renamed.get(name, name) if name else "**kwargs", node, file)
    if file.defaults:
        launch.remarks.append(f"arguments of {path} have their defaults: {', '.join(dict.fromkeys(file.defaults))}")
    return launch


def _put(launch: Launch, key: str, node: ast.expr | None, file: PythonFile) -> None:
    if node is None:
        launch.put(key, "", None, "the file sets it in a branch, or computes it")
        return
    try:
        value = file.value(node)
    except ValueError as error:
        launch.put(key, source(node), None, str(error))
    else:
        launch.put(key, str(value), value, literal(str(value)))


def translate(launch: Launch) -> Translation:
    """Translate every argument to a line."""
    return translate_keys(launch, read_table("trl"), answer_of).finished(launch, needs_reward=True)


def answer_of(launch: Launch, key: str, default: Any = None) -> Answer:
    """Return the answer for one argument."""
    return answer_for(launch, key, default, RULES, read_table("trl"))


def _generation(launch: Launch) -> tuple[float, float]:
    """Return prompts per generation, and optimizer steps for its samples."""
    micro = launch.get("per_device_train_batch_size", 8) * launch.get("num_processes", 1)
    one = micro * launch.get("gradient_accumulation_steps", 1)
    completions = launch.get("generation_batch_size") or micro * launch.get("steps_per_generation", one // micro)
    return completions / launch.get("num_generations", 8), completions / one


def _batch(launch: Launch, value: Any) -> Answer:
    prompts, updates = (max(1, round(it)) for it in _generation(launch))
    settings = (("trainer.prompts_per_step", prompts), ("algorithm.minibatches", updates))
    if (prompts, updates) != _generation(launch):
        return Answer("partly", settings, "rounded to whole prompts and mini-batches")
    if launch.get("num_processes"):
        return Answer("set", settings)
    if launch.get("generation_batch_size"):
        return Answer("partly", settings, "for one device; divide algorithm.minibatches by the number of processes")
    return Answer("partly", settings, "for one device; multiply trainer.prompts_per_step by the number of processes")


def _steps(launch: Launch, value: Any) -> Answer:
    if value <= 0:
        return Answer("always", note="num_train_epochs decides")
    updates = _generation(launch)[1] * launch.get("num_iterations", 1)
    return to(f"{updates:g} optimizer steps per step", trainer__steps=max(1, round(value / updates)))


def _every(setting: str) -> Rule:
    """Return a rule for a number of optimizer steps."""

    def rule(launch: Launch, value: Any) -> Answer:
        updates = _generation(launch)[1] * launch.get("num_iterations", 1)
        if 0 < value < 1:
            return Answer("none", note=f"a share of all steps; type  {setting}=N  in steps")
        return Answer("set", ((setting, max(1, round(value / updates))),))

    return rule


def _epochs(launch: Launch, value: Any) -> Answer:
    if launch.get("max_steps", -1) > 0:
        return Answer("always", note="max_steps decides")
    return to(trainer__epochs=value)


def _loss(launch: Launch, value: Any) -> Answer:
    if value == "dr_grpo":
        longest = launch.texts.get("max_completion_length", 512)
        note = f"the sum is not divided by max_completion_length={longest}, so gradients are {longest} times as large"
        return Answer("partly", (("algorithm", "grpo"), ("algorithm.average", "seq-mean-token-sum")), note)
    if value == "bnpo":
        note = "TRL averages over each micro-batch, rlcore over the mini-batch"
        return Answer("partly", (("algorithm", "grpo"), ("algorithm.average", "token-mean")), note)
    return read_table("trl").answer("loss_type", value) or Answer("none")


def _sync(launch: Launch, value: Any) -> Answer:
    if not value:
        return Answer("always", note="off")
    updates = _generation(launch)[1] * launch.get("num_iterations", 1)
    steps = max(1, round(launch.get("ref_model_sync_steps", 512) / updates))
    return to(
        f"{updates:g} optimizer steps per step",
        algorithm__kl__sync_every_steps=steps,
        algorithm__kl__sync_mix=launch.get("ref_model_mixup_alpha", 0.6),
    )


def _entropy(launch: Launch, value: Any) -> Answer:
    if not value:
        return Answer("always", note="off")
    names = {
        "target": ("entropy_target", 0.2),
        "delta": ("entropy_coef_delta", 0.005),
        "max": ("entropy_coef_max", 1.0),
        "min": ("entropy_coef_min", 0.0),
    }
    return Answer("set", tuple((f"algorithm.adaptive_entropy.{name}", launch.get(*key)) for name, key in names.items()))


def _lora(setting: str) -> Rule:
    """Return a rule for LoRA, whose default is 8 in Python."""

    def rule(launch: Launch, value: Any) -> Answer:
        python = launch.get("use_peft") == "LoraConfig" and setting not in launch.texts
        return Answer(
            "set", ((f"backend.{setting}" if setting != "lora_r" else "backend.lora_rank", 8 if python else value),)
        )

    return rule


def _data(launch: Launch, value: Any) -> Answer:
    if launch.module.endswith(".py") and not launch.has("dataset_train_split"):
        return to(data__train=value)
    return to(data__train=data_set(value, launch.get("dataset_train_split"), launch.get("dataset_config")))


def _scheduler(launch: Launch, value: Any) -> Answer:
    """Return the final learning rate of lr_scheduler_kwargs."""
    if not isinstance(value, Mapping) or not value.keys() <= {"min_lr", "min_lr_rate"}:
        return Answer("none", note="the schedules have a final learning rate only: optimizer.min_lr_ratio")
    if "min_lr" in value:
        return lr_floor("optimizer.min_lr_ratio", "learning_rate", 1e-6)(launch, value["min_lr"])
    return to(optimizer__min_lr_ratio=value["min_lr_rate"])


def _epsilon(launch: Launch, value: Any) -> Answer:
    return to(algorithm__clip_low=value, algorithm__clip_high=launch.get("epsilon_high") or value)


def _epsilon_high(launch: Launch, value: Any) -> Answer:
    cispo = launch.get("loss_type") == "cispo"  # there it bounds the ratio itself
    return to(algorithm__clip_high=value - 1 if cispo else value) if value else Answer("always", note="null: epsilon")


def _beta(launch: Launch, value: Any) -> Answer:
    if not value:
        return Answer("always", note="no KL penalty")
    return to(algorithm__kl__coefficient=value, algorithm__kl__where="loss", algorithm__kl__estimator="k3")


def _correction(launch: Launch, value: Any) -> Answer:
    if not value:
        return Answer("always", note="off")
    weight, _, beyond = str(launch.get("vllm_importance_sampling_mode", "sequence_mask")).partition("_")
    low, high = (launch.get(f"vllm_importance_sampling_clip_{end}", usual) for end, usual in (("min", 0), ("max", 3.0)))
    values = {"weight": weight, "beyond": beyond, "high": high, "low": low or 0}
    return Answer("set", tuple((f"algorithm.correction.{name}", it) for name, it in values.items()))


def _rewards(launch: Launch, value: Any) -> Answer:
    names = [str(it) for it in (value if isinstance(value, list) else [value])]
    if models := [name for name in names if "/" in name and ":" not in name]:
        return Answer("none", note=f"{', '.join(models)}: a reward model is  reward=model reward.model=DIR")
    places = [
        name if ":" in name else ":".join((name if "." in name else f"trl.rewards.{name}").rsplit(".", 1))
        for name in names
    ]
    weights = launch.get("reward_weights") or [1.0] * len(places)
    items = [f"{{name: {name}, weight: {weight}}}" for name, weight in zip(places, weights, strict=True)]
    return to("their signatures are recognized", reward=f"[{','.join(items)}]")


def _mode(launch: Launch, value: Any) -> Answer:
    if value != "server":
        return Answer("always", note="engines share the devices of the models; device_sharing decides who holds them")
    url = f"http://{launch.get('vllm_server_host', '0.0.0.0')}:{launch.get('vllm_server_port', 8000)}"
    return to(rollout__url=launch.get("vllm_server_base_url") or url, placement="split")


def _trackers(launch: Launch, value: Any) -> Answer:
    names = value if isinstance(value, list) else [value or "none"]
    known = [TRACKERS[name] for name in names if name in TRACKERS]
    settings = (("trackers", tracker_list(["console", "jsonl", *known], launch.get("project"))),)
    if "all" in names:
        return Answer("partly", settings, "name the trackers:  rlcore list-plugins --kind tracker --all")
    unknown = ", ".join(str(name) for name in names if name not in (*TRACKERS, "none"))
    return Answer("partly", settings, f"there is no tracker for {unknown}") if unknown else Answer("set", settings)


def _warmup(launch: Launch, value: Any) -> Answer:
    if 0 < value < 1:
        return to(optimizer__warmup_ratio=value)
    return to(optimizer__warmup_steps=round(value)) if value else Answer("always", note="no warm-up")


def _betas(launch: Launch, value: Any) -> Answer:
    return to(optimizer__betas=[launch.get("adam_beta1", 0.9), launch.get("adam_beta2", 0.999)])


def _output(launch: Launch, value: Any) -> Answer:
    return to(run__directory=value) if launch.has("run_name") else directory(launch, value)


RULES: dict[str, Rule] = {
    "per_device_train_batch_size": _batch,
    "max_steps": _steps,
    "num_train_epochs": _epochs,
    "save_steps": _every("checkpoint.every_steps"),
    "eval_steps": _every("eval.every_steps"),
    "epsilon": _epsilon,
    "epsilon_high": _epsilon_high,
    "beta": _beta,
    "reward_funcs": _rewards,
    "loss_type": _loss,
    "sync_ref_model": _sync,
    "use_adaptive_entropy": _entropy,
    "lora_r": _lora("lora_r"),
    "lora_alpha": _lora("lora_alpha"),
    "dataset_name": _data,
    "lr_scheduler_kwargs": _scheduler,
    "vllm_mode": _mode,
    "vllm_importance_sampling_correction": _correction,
    "output_dir": _output,
    "report_to": _trackers,
    "warmup_ratio": _warmup,
    "warmup_steps": _warmup,
    "adam_beta1": _betas,
    "adam_beta2": _betas,
}
"""Argument -> rule."""
