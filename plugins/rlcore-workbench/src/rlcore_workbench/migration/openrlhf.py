"""OpenRLHF's trainers: train_ppo_ray, train_sft, train_dpo and train_rm, with flags."""

from __future__ import annotations

from typing import Any

from rlcore_workbench.migration.answer import Answer, Rule, data_set, directory, to, tracker_list
from rlcore_workbench.migration.flags import read_flags
from rlcore_workbench.migration.launch import Launch
from rlcore_workbench.migration.programs import Program
from rlcore_workbench.migration.table import Table, read_table
from rlcore_workbench.migration.translation import Translation, answer_for, translate_keys

_TRAINERS = {"train_ppo_ray": "ppo", "train_sft": "sft", "train_dpo": "dpo", "train_rm": "reward_model"}
_ESTIMATORS = {"gae": "ppo", "reinforce": "reinforce_plus_plus", "reinforce_baseline": "reinforce_plus_plus_baseline"}
_ESTIMATORS |= {"rloo": "rloo", "group_norm": "grpo", "dr_grpo": "dr_grpo"}
_ESTIMATOR, _ADVANTAGE, _KL = "algo.advantage.estimator", "algo.advantage.", "algo.kl."
_TEMPLATE = "data.input_template"


def is_launch(found: Program) -> bool:
    """Return whether a program is a trainer of OpenRLHF."""
    return _name(found) in _TRAINERS and "openrlhf" in found.name


def _name(found: Program) -> str:
    return found.name.removesuffix(".py").replace("/", ".").rpartition(".")[2]


def read_command(found: Program) -> Launch:
    """Read the flags."""
    return read_flags(found, _TRAINERS[_name(found)])


def translate(launch: Launch) -> Translation:
    """Translate every flag to a line."""
    table = _table(launch)
    done = translate_keys(launch.renamed(table.known), table, answer_of)
    return done.finished(launch, needs_reward=launch.trainer == "ppo")


def _table(launch: Launch) -> Table:
    return read_table(f"openrlhf_{launch.trainer}")


def answer_of(launch: Launch, key: str, default: Any = None) -> Answer:
    """Return the answer for one flag."""
    return answer_for(launch, key, default, RULES, _table(launch))


def _steps(launch: Launch) -> tuple[int, Any]:
    """Return prompts per step, and mini-batches."""
    if launch.trainer != "ppo":
        return launch.get("train.batch_size", 128), 1
    prompts = launch.get("rollout.batch_size", 1024)
    return prompts, prompts * launch.get("rollout.n_samples_per_prompt", 1) / launch.get("train.batch_size", 128)


def _batch(launch: Launch, value: Any) -> Answer:
    prompts, updates = _steps(launch)
    if updates == int(updates):
        return to(trainer__prompts_per_step=prompts, algorithm__minibatches=int(updates))
    note = f"mini-batches have equal size here: {updates:g} are rounded"
    settings = (("trainer.prompts_per_step", prompts), ("algorithm.minibatches", max(1, round(updates))))
    return Answer("partly", settings, note)


def _algorithm(launch: Launch, value: Any) -> Answer:
    if launch.trainer != "ppo":
        return to(algorithm=launch.trainer)
    name = _ESTIMATORS.get(value)
    if name is None:
        return Answer("none", note="no such estimator:  rlcore config algorithm=dapo  lists algorithm.estimator")
    if name == "ppo":
        return to(algorithm="ppo")
    if launch.get("actor.policy_loss_type") == "gspo":
        return to(algorithm="gspo", algorithm__estimator=name)
    if launch.get("algo.dynamic_filtering_enable") or launch.get("reward.overlong_buffer_len"):
        more = {} if launch.get("algo.dynamic_filtering_enable") else {"algorithm__refill__rounds": 0}
        return to(algorithm="dapo", algorithm__estimator=name, **more)
    return to(algorithm=name, algorithm__average="token-mean")


def _clip(launch: Launch, value: Any) -> Answer:
    low, high = launch.get("actor.eps_clip_low_high") or (value, value)
    return to(algorithm__clip_low=low, algorithm__clip_high=high)


def _kl(launch: Launch, value: Any) -> Answer:
    if not value:
        return Answer("always", note="no KL penalty")
    where = "loss" if launch.get(_KL + "use_loss") else "reward"
    names = {"algorithm.kl.coefficient": value, "algorithm.kl.where": where}
    names["algorithm.kl.estimator"] = launch.get(_KL + "estimator", "k1")
    if launch.get(_KL + "target") and where == "reward":
        names |= {"algorithm.kl.controller": "adaptive", "algorithm.kl.target": launch.get(_KL + "target")}
        names["algorithm.kl.horizon"] = launch.get(_KL + "horizon", 10000)
    return Answer("set", tuple(names.items()))


def _correction(launch: Launch, value: Any) -> Answer:
    kind = launch.get(_ADVANTAGE + "is_correction_type", "tis")
    low, high = launch.get(_ADVANTAGE + "is_correction_threshold", [0.5, 5.0])
    settings = {"weight": "token", "beyond": "truncate" if kind == "tis" else "mask", "low": low, "high": high}
    answer = tuple((f"algorithm.correction.{name}", it) for name, it in settings.items())
    return Answer("partly", answer, "token by token") if "seq" in str(kind) else Answer("set", answer)


def _overlong(launch: Launch, value: Any) -> Answer:
    factor = launch.get("reward.overlong_penalty_factor", 1)
    return to(algorithm__overlong__tokens=int(value), algorithm__overlong__factor=factor)


def _length(launch: Launch, value: Any) -> Answer:
    responses = launch.get("rollout.max_new_tokens")
    if responses:
        return to("prompt and response together", data__max_prompt_tokens=max(1, value - responses))
    settings = (("data.max_prompt_tokens", value), ("sampling.max_response_tokens", value))
    return Answer("partly", settings, "prompt and response have a limit each")


def _epochs(launch: Launch, value: Any) -> Answer:
    return to(algorithm__epochs=value) if launch.trainer == "ppo" else to(trainer__epochs=value)


def _pool(setting: str) -> Rule:
    """Return a rule for the pool of the actor, which the engines share with train.colocate_all."""

    def rule(launch: Launch, value: Any) -> Answer:
        if launch.get("train.colocate_all"):
            return Answer("set", ((f"pools.main.{setting}", value),))
        size = launch.get("vllm.num_engines", 1) * launch.get("vllm.tensor_parallel_size", 1)
        pools = ((f"pools.actor.{setting}", value), ("placement", "split"), ("pools.rollout.devices_per_node", size))
        return Answer("set", pools, f"{size} devices for the engines")

    return rule


def _reward(launch: Launch, value: Any) -> Answer:
    text = str(value)
    if text.endswith(".py"):
        return Answer("partly", (("reward", f"{text}:reward_func"),), "return one score for each completion")
    return Answer("none", note="a server:  reward=remote  of rlcore-rewards, with its url")


def _reward_model(launch: Launch, value: Any) -> Answer:
    if launch.get(_ESTIMATOR, "gae") != "gae" or launch.has("critic.model_name_or_path"):
        return to(reward="model", reward__model=value)
    return to("the critic starts from it, too", reward="model", reward__model=value, critic__path=value)


def _data(setting: str, split: str) -> Rule:
    return lambda launch, value: Answer("set", ((setting, data_set(value, launch.get(split))),))


def _template_of(launch: Launch) -> str:
    """Return the template that takes effect, or an empty text."""
    text = str(launch.get(_TEMPLATE, "User: {}\nAssistant: " if launch.trainer == "sft" else ""))
    return text if "{}" in text and not launch.get("data.apply_chat_template") else ""


def _template(launch: Launch, value: Any) -> Answer:
    if not _template_of(launch):
        return Answer("always", note="has no effect with data.apply_chat_template, or without {}")
    column = launch.get("data.input_key", "input" if launch.trainer in ("ppo", "sft") else "prompt")
    return to(data__template=str(value).replace("{}", f"{{{column}}}"))


def _column(launch: Launch, value: Any) -> Answer:
    return Answer("set", note=f"part of {_TEMPLATE}") if _template_of(launch) else to(data__prompt_column=value)


def _trackers(launch: Launch, value: Any) -> Answer:
    names = ["wandb"] if launch.has("logger.wandb.key") or launch.has("logger.wandb.project") else []
    names += ["tensorboard"] if launch.has("logger.tensorboard_dir") else []
    return to(trackers=tracker_list(["console", "jsonl", *names], launch.get("logger.wandb.project")))


RULES: dict[str, Rule] = {
    _ESTIMATOR: _algorithm,
    "train.batch_size": _batch,
    "rollout.batch_size": _batch,
    "actor.eps_clip": _clip,
    "actor.eps_clip_low_high": _clip,
    _KL + "init_coef": _kl,
    _ADVANTAGE + "is_correction_enable": _correction,
    "reward.overlong_buffer_len": _overlong,
    "data.max_len": _length,
    "train.max_epochs": _epochs,
    "actor.num_nodes": _pool("nodes"),
    "actor.num_gpus_per_node": _pool("devices_per_node"),
    "reward.remote_url": _reward,
    "reward.model_name_or_path": _reward_model,
    "ckpt.output_dir": directory,
    "data.dataset": _data("data.train", "data.dataset_split"),
    "eval.dataset": _data("data.eval", "eval.split"),
    _TEMPLATE: _template,
    "data.input_key": _column,
    **{f"logger.{name}": _trackers for name in ("wandb.key", "wandb.project", "tensorboard_dir")},
}
"""Flag -> rule."""
