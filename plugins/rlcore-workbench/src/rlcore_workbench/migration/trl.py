"""TRL's GRPO trainer: `GRPOConfig(…)` in a Python file, which is not executed, and `trl grpo` with flags or a YAML file."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlcore.errors import ConfigError
from rlcore_workbench.migration.answer import TRACKERS, Answer, Rule, directory, to, tracker_list
from rlcore_workbench.migration.flags import read_flags
from rlcore_workbench.migration.launch import Launch, read_text
from rlcore_workbench.migration.programs import Program
from rlcore_workbench.migration.table import read_table
from rlcore_workbench.migration.translation import Translation, answer_for, translate_keys
from rlcore_workbench.migration.words import literal

_EXAMPLE = (
    "Type  rlcore migrate FILE.py   with a file that calls GRPOConfig, or  rlcore migrate 'trl grpo --config FILE'"
)
_CALLS = {
    "GRPOConfig": {},
    "LoraConfig": {"r": "lora_r", "target_modules": "lora_target_modules"},
    "GRPOTrainer": {"model": "model_name_or_path", "reward_funcs": "reward_funcs", "train_dataset": "dataset_name"},
}
"""Function -> names of its arguments as those of `trl grpo`. Other arguments of GRPOTrainer are Python objects."""


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
    merged = read_yaml(Path(launch.text("config")))
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
    except yaml.YAMLError as error:
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
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ConfigError(f"{path}:{error.lineno} is not valid Python: {error.msg}\n{_EXAMPLE}") from error
    configs = [call.lineno for call in _calls(tree, "GRPOConfig")]
    if len(configs) != 1:
        where = (
            f"{len(configs)} calls of GRPOConfig, at lines {', '.join(map(str, configs))}" if configs else "no launch"
        )
        raise ConfigError(f"{path} has {where}, not one call of GRPOConfig\n{_EXAMPLE}")
    launch = Launch(module=str(path), trainer="grpo")
    names = _assigned(tree)
    for function, renamed in _CALLS.items():
        for call in _calls(tree, function):
            for keyword in call.keywords:
                if function != "GRPOTrainer" or keyword.arg in renamed:
                    name = renamed.get(str(keyword.arg), keyword.arg) or f"**{ast.unparse(keyword.value)}"
                    _put(launch, name, keyword.value, names, path)
    return launch


def _calls(tree: ast.AST, function: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == function:
            yield node


def _assigned(tree: ast.AST) -> dict[str, ast.expr | None]:
    """Return variable -> its value, None for a variable that is assigned several times; functions are their names."""
    found: dict[str, ast.expr | None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            found[name] = None if name in found else node.value
        elif isinstance(node, ast.ImportFrom):
            found |= {it.asname or it.name: ast.Constant(f"{node.module}:{it.name}") for it in node.names}
        elif isinstance(node, ast.FunctionDef):
            found[node.name] = ast.Constant(f":{node.name}")
    return found


def _put(launch: Launch, key: str, node: ast.expr, names: Mapping[str, ast.expr | None], path: Path) -> None:
    text = ast.unparse(node)
    try:
        value = _value(node, names, path)
    except ValueError:
        launch.put(key, text, None, f"the file computes it: {text}")
    else:
        launch.put(key, str(value), value, literal(str(value)))


def _value(node: ast.expr, names: Mapping[str, ast.expr | None], path: Path) -> Any:
    """Evaluate literals, variables that are assigned once, names of functions, and the name in load_dataset("name")."""
    match node:
        case ast.Name(id=name) if (known := names.get(name)) is not None:
            return _value(known, {it: value for it, value in names.items() if it != name}, path)
        case ast.Constant(value=str(text)) if text.startswith(":"):
            return f"{path}{text}"
        case ast.List(elts=parts):
            return [_value(part, names, path) for part in parts]
        case ast.Call(func=ast.Name(id="load_dataset"), args=[ast.Constant(value=str(text)), *_]):
            return text
    return ast.literal_eval(node)


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
    if launch.get("num_processes") or launch.get("generation_batch_size"):
        return Answer("set", settings)
    return Answer("partly", settings, "for one device; multiply trainer.prompts_per_step by the number of processes")


def _steps(launch: Launch, value: Any) -> Answer:
    if value <= 0:
        return Answer("always", note="num_train_epochs decides")
    updates = _generation(launch)[1] * launch.get("num_iterations", 1)
    return to(f"{updates:g} optimizer steps per step", trainer__steps=max(1, round(value / updates)))


def _epochs(launch: Launch, value: Any) -> Answer:
    if launch.get("max_steps", -1) > 0:
        return Answer("always", note="max_steps decides")
    return to(trainer__epochs=value)


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
    weight, _, beyond = launch.get("vllm_importance_sampling_mode", "sequence_mask").partition("_")
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
    names = value if isinstance(value, list) else [value]
    known = [TRACKERS[name] for name in names if name in TRACKERS]
    settings = (("trackers", tracker_list(["console", "jsonl", *known], launch.get("project"))),)
    unknown = ", ".join(str(name) for name in names if name not in (*TRACKERS, "none", "all"))
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
    "epsilon": _epsilon,
    "epsilon_high": _epsilon_high,
    "beta": _beta,
    "reward_funcs": _rewards,
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
