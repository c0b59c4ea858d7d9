"""Keys for the run: data, devices, engines, rewards, trackers, checkpoints."""

from __future__ import annotations

from typing import Any

from rlcore_workbench.verl.answer import ACTOR, BATCH, MICRO, MINI, ROLLOUT, Answer, Rule, available, only, to
from rlcore_workbench.verl.command import Launch
from rlcore_workbench.verl.keys import NONE

CUSTOM = "custom_reward_function."
ENGINE_KWARGS = ROLLOUT + "engine_kwargs."
TRACKERS = {"console": "console", "wandb": "wandb", "tensorboard": "tensorboard", "file": "jsonl"}


def _micro_batch(launch: Launch, value: Any) -> Answer:
    if launch.get(ACTOR + "use_dynamic_bsz"):
        return Answer("always", note="micro-batches are cut by tokens: model.max_tokens_per_device")
    longest = launch.get("data.max_prompt_length", 512) + launch.get("data.max_response_length", 512)
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


def _filter(launch: Launch, value: Any) -> Answer:
    if value:
        return to(data__overlong="drop")
    return Answer("always", note="off: data.truncation decides")


def _schedule(launch: Launch, value: Any) -> Answer:
    if value in ("constant", "cosine", "linear"):
        return to(optimizer__schedule=value)
    return Answer("none", note="the schedules are constant, linear and cosine")


def _warmup_ratio(launch: Launch, value: Any) -> Answer:
    if launch.get(ACTOR + "optim.lr_warmup_steps", -1) > 0 or not value:
        return Answer("always", note="has no effect: lr_warmup_steps is given, or there is no warmup")
    steps = launch.get("trainer.total_training_steps")
    if not steps:
        return Answer(
            "none",
            note="type  optimizer.warmup_steps=N  in optimizer steps; the number of steps of the run is not given",
        )
    updates = steps * max(1, round(launch.get(BATCH, 1024) / launch.get(MINI, 256)))
    return to(f"{value} of {updates} optimizer steps", optimizer__warmup_steps=int(value * updates))


def engine_options(launch: Launch, key: str, value: Any) -> Answer:
    """Return the answer for an argument that verl passes unchanged to its engine."""
    engine, _, name = key.removeprefix(ENGINE_KWARGS).partition(".")
    if engine != launch.get(ROLLOUT + "name", "vllm"):
        return Answer("always", note=f"has no effect without {ROLLOUT}name={engine}")
    return Answer("set", ((f"rollout.engine_options.{name}", value),))


def _max_response(launch: Launch, value: Any) -> Answer:
    longest = launch.get("data.max_response_length", 512)
    if value == longest:
        return Answer("always", note="set once: sampling.max_response_tokens")
    return Answer("none", note=f"the penalty applies to responses near sampling.max_response_tokens={longest}")


def _engine(launch: Launch, value: Any) -> Answer:
    if value in available("rollout"):
        return to(rollout=value)
    return Answer("none", note=f"no engine '{value}':  rlcore list-plugins --kind rollout --all")


def _val_temperature(launch: Launch, value: Any) -> Answer:
    if not launch.get(ROLLOUT + "val_kwargs.do_sample", False):
        return Answer("always", note="has no effect without val_kwargs.do_sample=True: evaluation is greedy")
    return to(eval__temperature=float(value))


def _val_sample(launch: Launch, value: Any) -> Answer:
    if not value:
        return to(eval__temperature=0.0)
    return to(eval__temperature=float(launch.get(ROLLOUT + "val_kwargs.temperature", 0.0)))


def _epochs(launch: Launch, value: Any) -> Answer:
    if launch.get("trainer.total_training_steps"):
        return Answer("always", note="trainer.total_training_steps decides")
    batch = launch.get(BATCH, 1024)
    return Answer(
        "partly", note=f"type  trainer.steps=N   where {value} epochs are {value} × (rows of the data ÷ {batch}) steps"
    )


def _logger(launch: Launch, value: Any) -> Answer:
    names = value if isinstance(value, list) else [value]
    known = [TRACKERS[name] for name in names if name in TRACKERS]
    project = launch.get("trainer.project_name")
    items = [f"{{name: wandb, project: {project}}}" if name == "wandb" and project else name for name in known]
    settings = (("trackers", f"[{','.join(items)}]"),)
    if unknown := [str(name) for name in names if name not in TRACKERS]:
        return Answer("partly", settings, f"there is no tracker for {', '.join(unknown)}")
    return Answer("set", settings)


def _project(launch: Launch, value: Any) -> Answer:
    logger = launch.get("trainer.logger", ["console", "wandb"])
    if "wandb" in (logger if isinstance(logger, list) else [logger]):
        return Answer("set", note="the project of the tracker wandb")
    return Answer("always", note="used only by trackers with projects")


def _directory(launch: Launch, value: Any) -> Answer:
    head, _, last = str(value).rstrip("/").rpartition("/")
    if last and last == launch.get("trainer.experiment_name"):
        return to("runs are written to run.directory/run.name", run__directory=head or "/")
    return to("runs are written to run.directory/run.name", run__directory=value)


def _resume(launch: Launch, value: Any) -> Answer:
    here = {"auto": "auto", "disable": "never"}.get(value)
    if here is None:
        return Answer("none", note="a run resumes from its own checkpoints: use the same run.directory and run.name")
    return to(run__resume=here)


def _reward(launch: Launch, value: Any) -> Answer:
    """Return the file and the function of the reward, with its options."""
    place = f"{launch.get(CUSTOM + 'path')}:{launch.get(CUSTOM + 'name', 'compute_score')}"
    prefix = CUSTOM + "reward_kwargs."
    options = {key.removeprefix(prefix): launch.text(key) for key in launch.texts if key.startswith(prefix)}
    if not launch.get(CUSTOM + "path"):
        return Answer("always", note="no custom function")
    item = ", ".join(f"{name}: {value}" for name, value in {"name": place, **options}.items())
    return to("its signature is recognized", reward=f"[{{{item}}}]" if options else place)


def _manager(launch: Launch, value: Any) -> Answer:
    if value == "dapo":
        return Answer("set", note="its penalty for long responses: reward_model.overlong_buffer")
    if value in ("naive", "batch", "prime"):
        return Answer("always", note="rewards run in separate processes: reward.num_processes")
    return Answer("none", note=f"manager '{value}': write its additions to the score as a separate reward")


def _reward_model(launch: Launch, value: Any) -> Answer:
    if not value:
        return Answer("always", note="off")
    settings = (("reward", "model"),)
    return Answer("partly", settings, "its directory must have a value head, as written by algorithm=reward_model")


def _reward_model_path(launch: Launch, value: Any) -> Answer:
    if not launch.get("reward_model.enable"):
        return Answer("always", note="has no effect without reward_model.enable=True")
    return to(reward__model=value)


def _free_cache(launch: Launch, value: Any) -> Answer:
    if value:
        return Answer("always", note="device_sharing=auto: on GPUs the engine sleeps while models train, if it can")
    return to("engine and models keep their memory", device_sharing="never")


def _max_turns(launch: Launch, value: Any) -> Answer:
    if not launch.get(ROLLOUT + "multi_turn.enable"):
        return Answer("always", note="has no effect without multi_turn.enable=True")
    if value is None:
        return Answer("none", note="episodes always have a limit:  episode.max_turns=N")
    return to(episode__max_turns=value)


RULES: dict[str, Rule] = {
    MICRO: _micro_batch,
    ACTOR + "ppo_micro_batch_size": _micro_batch,
    ACTOR + "ppo_max_token_len_per_gpu": _max_tokens,
    ROLLOUT + "log_prob_max_token_len_per_gpu": _log_prob_tokens,
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": _log_prob_tokens,
    "critic.ppo_max_token_len_per_gpu": _log_prob_tokens,
    "critic.forward_max_token_len_per_gpu": _log_prob_tokens,
    "data.truncation": _truncation,
    "data.filter_overlong_prompts": _filter,
    ACTOR + "optim.lr_scheduler_type": _schedule,
    ACTOR + "optim.warmup_style": _schedule,
    ACTOR + "optim.lr_warmup_steps_ratio": _warmup_ratio,
    ROLLOUT + "name": _engine,
    ROLLOUT + "val_kwargs.temperature": _val_temperature,
    ROLLOUT + "val_kwargs.do_sample": _val_sample,
    "trainer.total_epochs": _epochs,
    "trainer.logger": _logger,
    "trainer.project_name": _project,
    "trainer.default_local_dir": _directory,
    "trainer.resume_mode": _resume,
    "trainer.critic_warmup": only(0, "actor and critic start together", "actor and critic start together"),
    "trainer.val_before_train": only(
        True, "the default if data.eval is given", "the first evaluation cannot be switched off"
    ),
    "trainer.val_only": only(False, "off", "type  rlcore eval DIR key=value"),
    "reward_model.enable": _reward_model,
    "reward_model.model.path": _reward_model_path,
    "reward_model.reward_manager": _manager,
    "reward_model.max_resp_len": _max_response,
    CUSTOM + "path": _reward,
    CUSTOM + "name": _reward,
    "actor_rollout_ref.model.target_modules": only(
        "all-linear", "adapters are added to every linear layer", "backend.lora_targets takes module names"
    ),
    "actor_rollout_ref.model.trust_remote_code": only(
        False, "code in a model directory is never executed", "code in a model directory is never executed"
    ),
    ROLLOUT + "free_cache_engine": _free_cache,
    ROLLOUT + "ignore_eos": only(False, "off", "a response ends with the end token"),
    ROLLOUT + "dtype": only("bfloat16", "model.precision", "one precision for trainer and engine: model.precision"),
    ROLLOUT + "logprobs_mode": only(
        "processed_logprobs", "at the sampling temperature", "log-probs are computed at the sampling temperature"
    ),
    "trainer.v1.trainer_mode": only("sync", "the schedule", "the schedule is sync"),
    "distillation.enabled": only(False, "off", NONE["distillation.*"]),
    "trainer.device": only("cuda", "pools use GPUs if there are any", "pools.main.device=cpu, or cuda"),
    ROLLOUT + "multi_turn.enable": only(False, "off", NONE[ROLLOUT + "multi_turn.*"]),
    ROLLOUT + "multi_turn.max_assistant_turns": _max_turns,
}
"""Key -> rule."""
