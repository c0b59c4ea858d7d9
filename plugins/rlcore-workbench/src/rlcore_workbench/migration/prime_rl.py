"""prime-rl's TOML files for `rl` and `sft`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlcore.errors import ConfigError
from rlcore_workbench.migration.answer import Answer, Rule, data_set, lr_floor, to, tracker_list
from rlcore_workbench.migration.flags import read_flags
from rlcore_workbench.migration.launch import Launch, read_text
from rlcore_workbench.migration.programs import Program
from rlcore_workbench.migration.table import Table, read_table
from rlcore_workbench.migration.translation import Translation, answer_for, translate_keys
from rlcore_workbench.migration.words import literal

_EXAMPLE = "Type  rlcore migrate FILE.toml   with a file for  uv run rl @ FILE.toml  or  uv run sft @ FILE.toml"
_ENGINE = "inference.vllm."


def is_launch(found: Program) -> bool:
    """Return whether a program is `rl @ FILE.toml`."""
    return found.name == "rl" and [word.text for word in found.arguments[:1]] == ["@"]


def read_command(found: Program) -> Launch:
    """Read the file after the @; flags that follow override it."""
    path = Path(found.arguments[1].text if len(found.arguments) > 1 else "")
    launch = read_toml(path, read_text(path, _EXAMPLE))
    flags = read_flags(Program(found.name, found.arguments[2:], found.line), launch.trainer)
    for key, text in flags.texts.items():
        launch.put(key.replace("-", "_"), text, flags.settings.get(key), flags.unreadable.get(key, ""))
    return launch


def read_toml(path: Path, text: str) -> Launch:
    """Read every key of a file. Raises ConfigError if it is not valid TOML or configures neither `rl` nor `sft`."""
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also a number with thousands of digits
        raise ConfigError(f"{path} is not valid TOML: {error}\n{_EXAMPLE}") from error
    if not {"orchestrator", "data"} & content.keys():
        raise ConfigError(f"{path} has no launch of rl or sft: neither [orchestrator] nor [data]\n{_EXAMPLE}")
    launch = Launch(trainer="sft" if "data" in content else "rl")
    for key, value in _flat(content):
        launch.put(key, str(value), value, literal(str(value)))
    return launch


def _flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys; a table in a list has the key NAME[]. An empty table has the value true."""
    for name, value in content.items():
        tables = value if isinstance(value, list) and value and isinstance(value[0], dict) else None
        if tables:
            for table in tables:
                yield from _flat(table, f"{prefix}{name}[].")
        elif isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", True if value == {} else value


def _table(launch: Launch) -> Table:
    return read_table(f"prime_rl_{launch.trainer}")


def translate(launch: Launch) -> Translation:
    """Translate every key to a line."""
    table = _table(launch)
    launch = launch.renamed(table.known)
    done = translate_keys(launch, table, answer_of)
    if launch.trainer == "rl":
        done.remarks.append("prime-rl masks tokens by their ratio; the nearest is  algorithm.correction.weight=token")
    return done.finished(launch, needs_reward=launch.trainer == "rl")


def answer_of(launch: Launch, key: str, default: Any = None) -> Answer:
    """Return the answer for one key."""
    table = _table(launch)
    if launch.trainer == "sft" and key.startswith(("eval.", "inference.", "orchestrator.group_size")):
        return Answer(
            "none", note="with algorithm=sft nothing is generated but for an evaluation: data.eval, rollout, reward"
        )
    if key.startswith(_ENGINE) and key not in {*table.same, *table.notes, *launch.unreadable}:
        return Answer("set", ((f"rollout.engine_options.{key.removeprefix(_ENGINE)}", launch.get(key)),))
    return answer_for(launch, key, default, RULES, table)


def _batch(launch: Launch, value: Any) -> Answer:
    size = launch.get("orchestrator.group_size", 1)
    settings = (("trainer.prompts_per_step", max(1, value // size)),)
    return Answer("partly" if value % size else "set", settings, f"{value} responses, {size} for each prompt")


def _length(launch: Launch, value: Any) -> Answer:
    responses = launch.get("train.sampling.max_completion_tokens")
    if responses and value > responses:
        return to("prompt and response together", data__max_prompt_tokens=value - responses)
    more = () if responses else (("sampling.max_response_tokens", value),)
    return Answer("partly", (("data.max_prompt_tokens", value), *more), "prompt and response have a limit each")


def _per_node(launch: Launch, value: Any) -> Answer:
    if not launch.has("deployment.num_train_nodes"):
        return Answer("always", note="on one node, the pools say how many devices they use")
    if launch.trainer == "sft":
        return to(pools__main__devices_per_node=value)
    return to(pools__actor__devices_per_node=value, pools__rollout__devices_per_node=value)


def _infer_nodes(launch: Launch, value: Any) -> Answer:
    replicas = launch.get("deployment.num_infer_replicas", 1)
    return to(
        f"{value} for each of {replicas} replicas" if replicas > 1 else "", pools__rollout__nodes=value * replicas
    )


def _data(launch: Launch, value: Any) -> Answer:
    ends = [launch.get(f"data.{name}") or [] for name in ("subsets", "splits")]
    count = max(1, *map(len, ends))
    subsets, splits = (end or [None] * count for end in ends)
    return to(
        data__train=",".join(data_set(value, split, subset) for subset, split in zip(subsets, splits, strict=True))
    )


def _betas(launch: Launch, value: Any) -> Answer:
    return to(optimizer__betas=[launch.get("optim.betas1", 0.9), launch.get("optim.betas2", 0.999)])


def _trackers(launch: Launch, value: Any) -> Answer:
    return to(trackers=tracker_list(["console", "jsonl", "wandb"], value))


RULES: dict[str, Rule] = {
    "orchestrator.batch_size": _batch,
    "seq_len": _length,
    "data.seq_len": _length,
    "deployment.gpus_per_node": _per_node,
    "deployment.num_infer_nodes": _infer_nodes,
    "data.name": _data,
    "optim.betas1": _betas,
    "optim.betas2": _betas,
    "scheduler.min_lr": lr_floor("optimizer.min_lr_ratio", "optim.lr", 1e-6),
    "monitors.wandb.project": _trackers,
}
"""Key -> rule."""
