"""Keys of verl that can be translated alone; loss.py and run.py have those that depend on other keys.

A key is in one of three tables: it has an equivalent setting (SAME), needs no setting (ALWAYS), or has no counterpart
(NONE). Patterns are those of fnmatch; the first match counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_A, _R, _M, _F = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model.", "fsdp_config."


def _paths(value: Any) -> Any:
    """Join a list of files with commas."""
    return ",".join(map(str, value)) if isinstance(value, list) else value


def _every(value: Any) -> Any:
    """Convert -1 (never, in verl) to 0."""
    return max(0, value) if isinstance(value, int) else value


def _same(value: Any) -> Any:
    return value


SAME: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "data.train_files": ("data.train", _paths),
    "data.val_files": ("data.eval", _paths),
    "data.prompt_key": ("data.prompt_column", _same),
    "data.train_batch_size": ("trainer.prompts_per_step", _same),
    "data.max_prompt_length": ("data.max_prompt_tokens", _same),
    "data.max_response_length": ("sampling.max_response_tokens", _same),
    "data.shuffle": ("data.shuffle", _same),
    "data.seed": ("run.seed", _same),
    "data.val_max_samples": ("eval.max_prompts", _same),
    _M + "path": ("model.path", _same),
    _M + "enable_gradient_checkpointing": ("model.gradient_checkpointing", _same),
    _M + "lora_rank": ("backend.lora_rank", _same),
    _M + "lora_alpha": ("backend.lora_alpha", _same),
    _A + "optim.lr": ("optimizer.lr", float),
    _A + "optim.lr_warmup_steps": ("optimizer.warmup_steps", _every),
    _A + "optim.weight_decay": ("optimizer.weight_decay", float),
    _A + "optim.min_lr_ratio": ("optimizer.min_lr_ratio", float),
    _A + "optim.betas": ("optimizer.betas", _same),
    _A + "grad_clip": ("optimizer.clip_grad_norm", float),
    _A + "optim.clip_grad": ("optimizer.clip_grad_norm", float),
    _A + "ppo_epochs": ("algorithm.epochs", _same),
    _A + "entropy_coeff": ("algorithm.entropy_coefficient", float),
    _R + "n": ("sampling.samples_per_prompt", _same),
    _R + "temperature": ("sampling.temperature", float),
    _R + "top_p": ("sampling.top_p", float),
    _R + "top_k": ("sampling.top_k", _every),
    _R + "tensor_model_parallel_size": ("rollout.tensor_parallel", _same),
    _R + "gpu_memory_utilization": ("rollout.gpu_memory_utilization", float),
    _R + "max_num_seqs": ("rollout.max_batch_size", _same),
    _R + "max_model_len": ("rollout.max_model_len", lambda value: value or 0),
    _R + "enforce_eager": ("rollout.enforce_eager", _same),
    _R + "enable_prefix_caching": ("rollout.prefix_caching", _same),
    _R + "val_kwargs.n": ("eval.samples_per_prompt", _same),
    "critic.model.path": ("critic.path", _same),
    "critic.optim.lr": ("critic.optimizer.lr", float),
    "critic.optim.weight_decay": ("critic.optimizer.weight_decay", float),
    "critic.optim.lr_warmup_steps": ("critic.optimizer.warmup_steps", _every),
    "critic.grad_clip": ("critic.optimizer.clip_grad_norm", float),
    "trainer.total_training_steps": ("trainer.steps", _same),
    "trainer.experiment_name": ("run.name", _same),
    "trainer.nnodes": ("pools.main.nodes", _same),
    "trainer.n_gpus_per_node": ("pools.main.devices_per_node", _same),
    "trainer.save_freq": ("checkpoint.every_steps", _every),
    "trainer.test_freq": ("eval.every_steps", _every),
    "trainer.max_actor_ckpt_to_keep": ("checkpoint.keep_last", _same),
}
"""Key -> setting, and the conversion of its value."""

_HF_FILES = "weights are read from the Hugging Face files of model.path"
ALWAYS: dict[str, str] = {
    "data.return_raw_chat": "messages in the prompt column are rendered by the tokenizer's chat template",
    "data.return_raw_input_ids": "workers exchange token ids",
    "data.val_batch_size": "an evaluation is one call; eval.max_prompts limits its prompts",
    "data.dataloader_num_workers": "rows are read and tokenized once, at the start",
    "data.filter_overlong_prompts_workers": "rows are read and tokenized once, at the start",
    "data.reward_fn_key": "every column is passed to the reward under its name",
    _M + "use_remove_padding": "samples are packed without padding",
    _M + "use_fused_kernels": "logits exist for one chunk of tokens at a time",
    "*.use_remove_padding": "samples are packed without padding",
    "*.use_dynamic_bsz": "micro-batches are cut by tokens: model.max_tokens_per_device",
    "*log_prob_use_dynamic_bsz": "micro-batches are cut by tokens: model.max_tokens_per_device",
    "*micro_batch_size": "micro-batches are cut by tokens: model.max_tokens_per_device",
    "*micro_batch_size_per_gpu": "micro-batches are cut by tokens: model.max_tokens_per_device",
    "critic.ppo_mini_batch_size": "actor and critic use the same mini-batches: algorithm.minibatches",
    "critic.ppo_epochs": "actor and critic use the same mini-batches: algorithm.epochs",
    "critic.model.tokenizer_path": "the tokenizer comes from model.path",
    "critic.model.enable_gradient_checkpointing": "one setting for all models: model.gradient_checkpointing",
    "actor_rollout_ref.hybrid_engine": "roles share the devices of one pool; placement=split separates them",
    _A + "optim.total_training_steps": "the schedule uses the steps of the run",
    _A + "use_torch_compile": "the entropy is computed in chunks; backend.compile=true compiles whole layers",
    _A + "shuffle": "every epoch has its own order: algorithm.shuffle_seed",
    _A + "rollout_n": "set once: sampling.samples_per_prompt",
    _R + "agent.num_workers": "episodes are coroutines in the process of their engine",
    _R + "mode": "responses arrive one by one as they finish",
    _R + "load_format": "weights come from model.path, then from the actor",
    _R + "calculate_log_probs": "every sample has the engine's log-probs; see the metric actor/rollout_logprob_gap",
    _R + "prompt_length": "set once: data.max_prompt_tokens",
    _R + "response_length": "set once: sampling.max_response_tokens",
    _R + "disable_log_stats": "engines do not log statistics",
    _R + "checkpoint_engine.backend": "the transfer of weights depends on the placement: transfer=auto",
    _R + "layered_summon": "weights are streamed, without a second full copy",
    "algorithm.use_pf_ppo": "off by default in verl, too",
    "trainer.balance_batch": "every step is balanced by tokens over the ranks",
    "trainer.use_legacy_worker_impl": "there is one implementation",
    "trainer.use_v1": "there is one implementation",
    "trainer.max_critic_ckpt_to_keep": "one checkpoint holds all roles: checkpoint.keep_last",
    "trainer.ray_wait_register_center_timeout": "every wait has a deadline: runtime.start_timeout_s",
    **{f"*.megatron.{name}": _HF_FILES for name in ("use_mbridge", "vanilla_mbridge", "*dist_checkpointing*")},
    "*.megatron.dtype": "one precision for all models: model.precision",
    "*.entropy_from_logits_with_chunking": "the entropy is always computed in chunks",
    "*.entropy_checkpointing": "the entropy is always computed in chunks",
    "actor_rollout_ref.ref.use_torch_compile": "backend.compile=true compiles the layers of every model",
    "actor_rollout_ref.nccl_timeout": "every wait has a deadline: runtime.call_timeout_s",
    "ray_init.num_cpus": "rlcore detects the cores that the process may use",
    "ray_kwargs.ray_init.num_cpus": "rlcore detects the cores that the process may use",
}
"""Key -> reason why no setting is needed."""

_TURNS = "write an environment for multi-turn conversations:  environment=FILE.py:NAME ; limits: episode.*"
_TOOLS = "tools are typed functions of an environment (rlcore_environments.tools):  environment=FILE.py:NAME"
_REWARD_MODEL = (
    "a reward model is  reward=model reward.model=DIR ; behind a server: reward=judge or remote (rlcore-rewards)"
)
NONE: dict[str, str] = {
    "data.truncation": "a prompt is truncated at its beginning or not at all: data.overlong=error, drop or truncate",
    "data.custom_cls*": "write a dataset plugin (rlcore.dataset), or convert the file once",
    "data.sampler*": "data.shuffle decides the order of prompts",
    "data.gen_batch_size": "each round samples trainer.prompts_per_step prompts, or as many as are missing",
    "data.image_key": "text only",
    "data.video_key": "text only",
    "data.tool_config_path": _TOOLS,
    _M + "use_liger": "only the kernels of PyTorch and the engine are used",
    _M + "external_lib": "import it in your own plugin",
    "*.profiler.*": "rlcore starts no profiler; use nsys or torch.profiler around `rlcore train runtime=local`",
    "global_profiler.*": "rlcore starts no profiler; use nsys or torch.profiler around `rlcore train runtime=local`",
    "*.megatron.*": "backend=megatron has no such setting:  rlcore config backend=megatron",
    "*." + _F + "offload_policy": "to keep parameters in host memory during the update, type  backend.cpu_offload=true",
    "*." + _F + "wrap_policy*": "layers are detected; backend.layers names them if that fails",
    "*." + _F + "*": "backend=fsdp decides this itself",
    _M + "override_config.*": "the configuration in model.path is used unchanged",
    "*.override_optimizer_config.*": "the optimizer runs on the device; backend.cpu_offload=true of fsdp keeps it in host memory",
    _R + "checkpoint_engine.*": "the size of buckets is rollout.bucket_mb of the engine",
    _R + "expert_parallel_size": "one engine for every rollout.tensor_parallel devices of the pool",
    _A + "kl_loss_type": "the estimators are k1, k2 and k3",
    _A + "checkpoint.*": "a checkpoint contains the model, the optimizer and everything that an exact resume needs",
    "critic.checkpoint.*": "a checkpoint contains the model, the optimizer and everything that an exact resume needs",
    _A + "policy_loss.*": "settings of one loss; for those of the algorithm, type  rlcore config algorithm=NAME",
    _A + "freeze_vision_tower": "text only",
    _R + "multi_turn.tool_config_path": _TOOLS,
    _R + "multi_turn.*": _TURNS,
    _R + "agent.*": _TURNS,
    _R + "max_num_batched_tokens": "the engine chooses it; rollout.max_batch_size limits the sequences in flight",
    _R + "enable_chunked_prefill": "the engine chooses it",
    _R + "data_parallel_size": "one engine for every rollout.tensor_parallel devices of the pool",
    _R + "val_kwargs.top_p": "evaluation samples from the whole distribution",
    _R + "val_kwargs.top_k": "evaluation samples from the whole distribution",
    "algorithm.pf_ppo.*": "rlcore has no such filter",
    "distillation.*": "a teacher is a setting of its algorithm:  rlcore config algorithm=distillation",
    "ray_init.*": "Ray is started with its defaults; a running cluster: runtime.address",
    "ray_kwargs.*.runtime_env.py_executable": "the interpreter of a pool's workers is pools.main.python",
    "ray_kwargs.*": "Ray is started with its defaults; a running cluster: runtime.address",
    "reward_model.*": _REWARD_MODEL,
    "reward.*": _REWARD_MODEL,
    "trainer.val_only": "type  rlcore eval DIR key=value",
    "trainer.val_before_train": "a run always evaluates before its first step if data.eval is given",
    "trainer.critic_warmup": "actor and critic start together",
    "trainer.rollout_data_dir": "trainer.log_samples samples of each step are in samples.jsonl",
    "trainer.validation_data_dir": "type  rlcore eval outputs/RUN --samples FILE",
    "trainer.log_val_generations": "type  rlcore eval outputs/RUN --samples FILE",
    "trainer.default_hdfs_dir": "checkpoints are written to a mounted file system",
    "trainer.esi_redundant_time": "SIGTERM finishes the step, writes a checkpoint and leaves no process behind",
    "trainer.v1.*": "the schedule is sync",
    "transfer_queue.*": "columns travel from worker to worker through the runtime's object store",
}
"""Key -> reason why there is no counterpart, and what to do instead."""
