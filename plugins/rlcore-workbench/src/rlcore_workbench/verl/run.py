"""Keys for the run: data, devices, engines, rewards, trackers, checkpoints."""

from __future__ import annotations

from typing import Any

from rlcore_workbench.migration.answer import PROJECTS, TRACKERS, Answer, Rule, available, lr_floor, to, tracker_list
from rlcore_workbench.migration.launch import Launch
from rlcore_workbench.verl.names import ACTOR, MICRO, ROLLOUT

CUSTOM = "custom_reward_function."
ENGINE_KWARGS = ROLLOUT + "engine_kwargs."


def _micro_batch(launch: Launch, value: Any) -> Answer:
    if launch.get(ACTOR + "use_dynamic_bsz"):
        return Answer("always", note="micro-batches are cut by tokens: model.max_tokens_per_device")
    longest = launch.get("data.max_prompt_length", 512) + launch.get("data.max_response_length", 512)
    if launch.trainer == "sft":
        longest = launch.get("data.max_length", 1024)
    return to(f"{value} samples of at most {longest} tokens", model__max_tokens_per_device=value * longest)


def _max_tokens(launch: Launch, value: Any) -> Answer:
    if launch.get(ACTOR + "use_dynamic_bsz") or not launch.has(MICRO):
        return to(model__max_tokens_per_device=value)
    return Answer("always", note=f"has no effect together with {MICRO} without use_dynamic_bsz")


def _log_prob_tokens(launch: Launch, value: Any) -> Answer:
    own = launch.get(ACTOR + "ppo_max_token_len_per_gpu", 16384)
    if value <= own:
        return Answer("always", note="log-probs are computed in the micro-batches of the update")
    return Answer("partly", note=f"one limit for update and log-probs: model.max_tokens_per_device={own}")


def _truncation(launch: Launch, value: Any) -> Answer:
    if launch.get("data.filter_overlong_prompts"):
        return Answer("always", note="longer prompts are dropped: data.overlong=drop")
    here = {"error": "error", "left": "truncate"}.get(value)
    if here is None:
        return Answer("none", note=f"a prompt is truncated at its beginning, not {value}: data.overlong=truncate")
    return to(data__overlong=here)


def _warmup_ratio(launch: Launch, value: Any) -> Answer:
    if launch.get(ACTOR + "optim.lr_warmup_steps", -1) > 0 or not value:
        return Answer("always", note="has no effect: lr_warmup_steps is given, or there is no warmup")
    return to(optimizer__warmup_ratio=float(value))


def engine_options(launch: Launch, key: str, value: Any) -> Answer:
    """Return the answer for an argument that verl passes unchanged to its engine."""
    engine, _, name = key.removeprefix(ENGINE_KWARGS).partition(".")
    if engine != launch.get(ROLLOUT + "name", "vllm"):
        return Answer("always", note=f"has no effect without {ROLLOUT}name={engine}")
    return Answer("set", ((f"rollout.engine_options.{name}", value),))


def _option(name: str) -> Rule:
    """Return a rule for an argument of vLLM."""

    def rule(launch: Launch, value: Any) -> Answer:
        if launch.get(ROLLOUT + "name", "vllm") != "vllm":
            return Answer("none", note="the engine chooses it:  rollout.engine_options")
        parallel = name == "enable_expert_parallel"
        if value is None or (parallel and value == 1):
            return Answer("always", note="the default")
        return Answer("set", ((f"rollout.engine_options.{name}", True if parallel else value),))

    return rule


def _max_response(launch: Launch, value: Any) -> Answer:
    longest = launch.get("data.max_response_length", 512)
    if value == longest:
        return Answer("always", note="set once: sampling.max_response_tokens")
    return Answer("none", note=f"the penalty applies to responses near sampling.max_response_tokens={longest}")


def _engine(launch: Launch, value: Any) -> Answer:
    if value in available("rollout"):
        return to(rollout=value)
    return Answer("none", note=f"no engine '{value}':  rlcore list-plugins --kind rollout --all")


def _val_sample(launch: Launch, value: Any) -> Answer:
    if not value:
        return to(eval__temperature=0.0)
    return to(eval__temperature=float(launch.get(ROLLOUT + "val_kwargs.temperature", 0.0)))


def _epochs(launch: Launch, value: Any) -> Answer:
    for key in ("trainer.total_training_steps", "rollout.total_rollout_steps"):
        if launch.get(key):
            return Answer("always", note=f"{key} decides")
    return to(trainer__epochs=value)


def _logger(launch: Launch, value: Any) -> Answer:
    names = value if isinstance(value, list) else [value]
    known = [TRACKERS[name] for name in names if name in TRACKERS]
    project = launch.get("trainer.project_name")
    settings = (("trackers", tracker_list(known, project)),)
    if unknown := [str(name) for name in names if name not in TRACKERS]:
        return Answer("partly", settings, f"there is no tracker for {', '.join(unknown)}")
    return Answer("set", settings)


def _project(launch: Launch, value: Any) -> Answer:
    logger = launch.get("trainer.logger", ["console", "wandb"])
    if PROJECTS.keys() & set(logger if isinstance(logger, list) else [logger]):
        return Answer("set", note="the project of the tracker")
    return Answer("always", note="used only by trackers with projects")


def _directory(launch: Launch, value: Any) -> Answer:
    head, _, last = str(value).rstrip("/").rpartition("/")
    if last and last == launch.get("trainer.experiment_name"):
        return to("runs are written to run.directory/run.name", run__directory=head or "/")
    return to("runs are written to run.directory/run.name", run__directory=value)


def _reward(launch: Launch, value: Any) -> Answer:
    """Return the file and the function of the reward, with its options."""
    place = f"{launch.get(CUSTOM + 'path')}:{launch.get(CUSTOM + 'name', 'compute_score')}"
    prefix = CUSTOM + "reward_kwargs."
    options = {key.removeprefix(prefix): launch.text(key) for key in launch.texts if key.startswith(prefix)}
    if not launch.get(CUSTOM + "path"):
        return Answer("always", note="no custom function")
    item = ", ".join(f"{name}: {value}" for name, value in {"name": place, **options}.items())
    return to("its signature is recognized", reward=f"[{{{item}}}]" if options else place)


def _max_length(launch: Launch, value: Any) -> Answer:
    settings = (("data.max_prompt_tokens", value), ("sampling.max_response_tokens", value))
    return Answer("partly", settings, "prompt and response have a limit each")


RULES: dict[str, Rule] = {
    "data.max_length": _max_length,
    MICRO: _micro_batch,
    ACTOR + "ppo_micro_batch_size": _micro_batch,
    ACTOR + "ppo_max_token_len_per_gpu": _max_tokens,
    ROLLOUT + "log_prob_max_token_len_per_gpu": _log_prob_tokens,
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": _log_prob_tokens,
    "critic.ppo_max_token_len_per_gpu": _log_prob_tokens,
    "critic.forward_max_token_len_per_gpu": _log_prob_tokens,
    "data.truncation": _truncation,
    ACTOR + "optim.lr_warmup_steps_ratio": _warmup_ratio,
    ACTOR + "optim.min_lr": lr_floor("optimizer.min_lr_ratio", ACTOR + "optim.lr", 1e-6),
    "critic.optim.min_lr": lr_floor("critic.optimizer.min_lr_ratio", "critic.optim.lr", 1e-5),
    ROLLOUT + "name": _engine,
    ROLLOUT + "enable_chunked_prefill": _option("enable_chunked_prefill"),
    ROLLOUT + "max_num_batched_tokens": _option("max_num_batched_tokens"),
    ROLLOUT + "cudagraph_capture_sizes": _option("cudagraph_capture_sizes"),
    ROLLOUT + "expert_parallel_size": _option("enable_expert_parallel"),
    ROLLOUT + "val_kwargs.do_sample": _val_sample,
    "trainer.total_epochs": _epochs,
    "trainer.logger": _logger,
    "trainer.project_name": _project,
    "trainer.default_local_dir": _directory,
    "reward_model.max_resp_len": _max_response,
    CUSTOM + "path": _reward,
    CUSTOM + "name": _reward,
}
"""Key -> rule."""
