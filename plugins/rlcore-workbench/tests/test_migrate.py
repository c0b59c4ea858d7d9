"""`rlcore migrate`: every key has a counterpart or a reason, and the resulting settings compose."""

import ast
import json
import re
import shlex
import subprocess
from dataclasses import fields
from importlib.resources import files
from pathlib import Path

import pytest
from rlcore_workbench.migrate import command, main
from rlcore_workbench.migration.launch import parse_value
from rlcore_workbench.migration.table import read_table
from rlcore_workbench.verl.command import read_launch
from rlcore_workbench.verl.loss import ESTIMATORS, LOSSES
from rlcore_workbench.verl.translate import RULES, translate

from rlcore.config.compose import PLUGIN_SECTIONS, compose
from rlcore.errors import ConfigError, UserError
from rlcore.kits.engine.config import EngineConfig

TABLE = read_table("verl")
TABLES = sorted(path.stem for path in files("rlcore_workbench").joinpath("tables").iterdir())
A, R, M = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
COMMON = f"""
data.train_files data.val_files data.train_batch_size data.truncation data.max_prompt_length data.max_response_length
data.filter_overlong_prompts data.shuffle data.prompt_key data.return_raw_chat data.reward_fn_key data.val_batch_size
trainer.project_name trainer.logger trainer.experiment_name trainer.total_epochs trainer.total_training_steps
trainer.test_freq trainer.save_freq trainer.nnodes trainer.n_gpus_per_node trainer.balance_batch trainer.critic_warmup
trainer.val_before_train trainer.resume_mode trainer.default_local_dir trainer.max_actor_ckpt_to_keep
{M}path {M}use_remove_padding {M}enable_gradient_checkpointing {M}lora_rank {M}lora_alpha
{A}ppo_mini_batch_size {A}optim.lr {A}use_dynamic_bsz {A}use_kl_loss {A}entropy_coeff {A}ppo_max_token_len_per_gpu
{A}kl_loss_coef {A}kl_loss_type {A}fsdp_config.param_offload {A}fsdp_config.optimizer_offload
{A}ppo_micro_batch_size_per_gpu {A}strategy {A}clip_ratio_low {A}clip_ratio_high {A}clip_ratio_c {A}clip_ratio
{A}policy_loss.loss_mode {A}loss_agg_mode {A}grad_clip {A}ppo_epochs {A}ulysses_sequence_parallel_size
{A}optim.lr_warmup_steps {A}optim.weight_decay
{R}name {R}gpu_memory_utilization {R}tensor_model_parallel_size {R}n {R}temperature {R}top_p {R}top_k
{R}log_prob_use_dynamic_bsz {R}log_prob_micro_batch_size_per_gpu {R}log_prob_max_token_len_per_gpu
{R}enforce_eager {R}free_cache_engine {R}mode {R}max_num_batched_tokens {R}max_model_len {R}enable_chunked_prefill
{R}val_kwargs.n {R}val_kwargs.do_sample {R}val_kwargs.temperature {R}val_kwargs.top_p
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu actor_rollout_ref.ref.fsdp_config.param_offload
algorithm.adv_estimator algorithm.use_kl_in_reward algorithm.kl_ctrl.kl_coef algorithm.gamma algorithm.lam
algorithm.norm_adv_by_std_in_grpo algorithm.filter_groups.enable
critic.optim.lr critic.model.path critic.ppo_micro_batch_size_per_gpu critic.cliprange_value
custom_reward_function.path custom_reward_function.name reward_model.reward_manager reward_model.enable
""".split()
"""The keys that verl's examples set most often."""

SCRIPT = r"""
#!/bin/bash
# Tested on 8 GPUs
set -x
MODEL_PATH=${MODEL_PATH:-/models/qwen}   # a comment
export N=5
DATA=(
    data.train_files="['/d/a.parquet', '/d/b.parquet']"
    data.train_batch_size=128
)
python3 -m verl.trainer.main_ppo --config-name=ppo_trainer \
    algorithm.adv_estimator=grpo "${DATA[@]}" \
    data.max_prompt_length=256 data.max_response_length=768 \
    actor_rollout_ref.model.path=$MODEL_PATH \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    +actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.002 \
    actor_rollout_ref.actor.kl_loss_type=mse \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=${N} \
    trainer.logger='["console","wandb"]' trainer.project_name=p \
    trainer.save_freq=-1 trainer.total_training_steps=$STEPS \
    trainer.n_gpus_per_node=8 trainer.n_gpus_per_node=4 trainer.made_up=1 $@
"""


def settings_of(text):
    return translate(read_launch(text)).settings


def answers(text):
    return {line.key: line.answer for line in translate(read_launch(text)).lines if line.given}


def test_a_script_becomes_a_command():
    done = translate(read_launch(SCRIPT))

    assert done.settings == {
        "data.train": "/d/a.parquet,/d/b.parquet",
        "trainer.prompts_per_step": 128,
        "algorithm": "grpo",
        "data.max_prompt_tokens": 256,
        "sampling.max_response_tokens": 768,
        "model.path": "/models/qwen",
        "algorithm.minibatches": 4,  # 128 prompts per step, 32 per mini-batch
        "model.max_tokens_per_device": 4096,  # 4 samples of at most 256 + 768 tokens
        "algorithm.kl.coefficient": 0.002,
        "algorithm.kl.where": "loss",
        "algorithm.kl.estimator": "k2",
        "rollout": "vllm",
        "sampling.samples_per_prompt": 5,
        "trackers": "[console,{name: wandb, project: p}]",
        "checkpoint.every_steps": 0,
        "pools.main.devices_per_node": 4,
        # defaults of verl that differ from rlcore's
        "backend": "fsdp",
        "algorithm.dual_clip": 3.0,
        "optimizer.weight_decay": 0.01,
        "rollout.gpu_memory_utilization": 0.5,
        "rollout.tensor_parallel": 2,
        "pools.main.nodes": 1,
        "eval.every_steps": 0,
        "model.precision": "bfloat16",
        "reward": "verl.utils.reward_score:default_compute_score",
    }
    assert [line.key for line in done.of("partly", "none")] == ["trainer.total_training_steps", "trainer.made_up"]
    assert any("trainer.n_gpus_per_node=8: given again later" in remark for remark in done.remarks)
    steps = next(line for line in done.lines if line.key == "trainer.total_training_steps")
    assert steps.answer.note == "refused by rlcore: the script does not set STEPS, and trainer.steps needs a value"


def test_every_common_key_is_in_the_tables():
    unknown = [
        key
        for key in COMMON
        if key not in {*RULES, *TABLE.values, *TABLE.same, *TABLE.notes}
        and "not in the table" in answers(f"{key}=1")[key].note
    ]

    assert len(COMMON) > 90
    assert unknown == []


def test_no_key_is_dropped():
    text = " ".join(f"{key}={VALUES.get(key, 1)}" for key in COMMON)

    done = translate(read_launch(text))

    assert sorted(line.key for line in done.lines if line.given) == sorted(COMMON)
    assert all(line.answer.settings or line.answer.note for line in done.lines)


VALUES = {
    "data.train_files": "/d",
    "data.val_files": "/e",
    "data.truncation": "left",
    "data.prompt_key": "question",
    "data.shuffle": "False",
    M + "enable_gradient_checkpointing": "True",
    M + "path": "/m",
    A + "optim.betas": "[0.9,0.95]",
    A + "strategy": "fsdp2",
    A + "loss_agg_mode": "seq-mean-token-sum",
    A + "optim.lr_scheduler_type": "cosine",
    A + "optim.warmup_style": "linear",
    R + "name": "hf",
    R + "top_k": "-1",
    "algorithm.adv_estimator": "gae",
    "algorithm.kl_ctrl.type": "adaptive",
    "model_engine": "fsdp",
    A + "policy_loss.loss_mode": "vanilla",
    A + "megatron.override_transformer_config.recompute_granularity": "full",
    A + "megatron.use_distributed_optimizer": "True",
    A + "megatron.sequence_parallel": "True",
    A + "fsdp_config.reshard_after_forward": "True",
    "critic.model.path": "/c",
    "trainer.logger": "console",
    "trainer.experiment_name": "x",
    "trainer.default_local_dir": "/o/x",
    "trainer.resume_mode": "disable",
    "distillation.enabled": "False",
    "custom_reward_function.path": "/r.py",
}


REFUSING = ("trainer.val_only", "trainer.v1.trainer_mode")
"""Keys whose other value is another trainer."""


def own_settings(package, name):
    """Fields of a plugin's Config, read from its source in this tree; None where it is not there."""
    file = Path(__file__).parents[2] / f"rlcore-{package}" / "src" / f"rlcore_{package}" / "config.py"
    if not file.is_file():
        return None
    classes = (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ClassDef))
    (found,) = (node for node in classes if node.name == name)
    shared = {it.name for it in fields(EngineConfig)} if "EngineConfig" in map(ast.unparse, found.bases) else set()
    return shared | {node.target.id for node in found.body if isinstance(node, ast.AnnAssign)}


@pytest.mark.parametrize("key", [key for key in {**TABLE.same, **RULES, **TABLE.values} if key not in REFUSING])
def test_every_translated_setting_exists_in_rlcore(key):
    other = key.partition(".")[0] in ("async_training", "rollout")
    begin = "python3 -m verl.experimental.fully_async_policy.fully_async_main " if other else ""
    switches = f"{begin}{A}use_kl_loss=False algorithm.use_kl_in_reward=True algorithm.adv_estimator=gae "
    text = f"{key}={VALUES.get(key, '1')}"
    text = (
        switches.replace("use_kl_in_reward=True ", "" if key.endswith("use_kl_in_reward") else "use_kl_in_reward=True ")
        + text
    )

    for setting, value in answers(text)[key].settings:
        section, _, rest = setting.partition(".")
        if rest and section in ("backend", "rollout"):
            megatron = "megatron" in key
            backend = ("megatron", "MegatronConfig") if megatron else ("fsdp", "FSDPConfig")
            fields = own_settings(*{"backend": backend, "rollout": ("vllm", "VLLMConfig")}[section])
            assert fields is None or rest.partition(".")[0] in fields
        elif section in PLUGIN_SECTIONS and rest:
            compose([setting + "=1"], complete=False)  # known when the algorithm is built; see the test below
        else:
            plain = shlex.split(command({setting: value}).partition("\\\n")[2])
            compose([*(["schedule=async"] if setting.startswith("schedule.") else []), *plain], complete=False)


@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_translated_settings_of_the_algorithm_are_in_its_config(estimator):
    from rlcore.config.build import build_plugin
    from rlcore.registry import resolve

    text = (
        f"algorithm.adv_estimator={estimator} {A}ppo_epochs=2 {A}clip_ratio=0.3 {A}entropy_coeff=0.01 {A}clip_ratio_c=4"
        f" algorithm.use_kl_in_reward=True algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.target_kl=0.2 algorithm.lam=0.9"
        f" critic.cliprange_value=0.4 algorithm.norm_adv_by_std_in_grpo=False {A}loss_agg_mode=seq-mean-token-sum"
    )
    words = shlex.split(
        command({k: v for k, v in settings_of(text).items() if k.startswith("algorithm")}).replace("\\\n", "")
    )
    choice = compose(words[2:], complete=False).config.algorithm

    config = build_plugin("algorithm", choice, resolve("algorithm", choice.name).object)

    assert choice.name == {"grpo": "grpo", "gae": "ppo"}[estimator]
    assert (config.epochs, config.clip_low, config.clip_high, config.dual_clip) == (2, 0.3, 0.3, 4.0)
    assert (config.kl.coefficient, config.kl.where, config.kl.estimator) == (0.001, "reward", "k1")
    assert (config.kl.controller, config.kl.target) == ("adaptive", 0.2)
    assert config.average == "seq-mean-token-sum"
    if estimator == "gae":
        assert (config.lam, config.clip_value) == (0.9, 0.4)
    else:
        assert config.normalize_by_std is False


@pytest.mark.parametrize(
    ("text", "key", "how", "words"),
    [
        (
            f"data.train_batch_size=100 {A}ppo_mini_batch_size=30",
            A + "ppo_mini_batch_size",
            "partly",
            "cannot be divided",
        ),
        ("data.truncation=middle", "data.truncation", "none", "not middle"),
        (f"{A}use_kl_loss=True {A}kl_loss_type=abs", A + "kl_loss_type", "none", "k1, k2, k3"),
        (
            f"{A}use_kl_loss=True algorithm.use_kl_in_reward=True",
            "algorithm.use_kl_in_reward",
            "none",
            "only one penalty",
        ),
        ("trainer.total_epochs=3 trainer.total_training_steps=9", "trainer.total_epochs", "always", "decides"),
        ("trainer.logger=[console,clearml]", "trainer.logger", "partly", "no tracker for clearml"),
        (f"{R}val_kwargs.temperature=0.6", R + "val_kwargs.temperature", "always", "has no effect without"),
        (f"{R}free_cache_engine=True", R + "free_cache_engine", "always", "device_sharing=auto"),
        (f"{R}multi_turn.enable=True", R + "multi_turn.enable", "none", "environment=FILE.py:NAME"),
        (f"{R}multi_turn.tool_config_path=t.yaml", R + "multi_turn.tool_config_path", "none", "typed functions"),
        (f"{R}agent.default_agent_loop=a", R + "agent.default_agent_loop", "none", "environment=FILE.py:NAME"),
        (
            "reward_model.input_tokenizer=/t",
            "reward_model.input_tokenizer",
            "none",
            "reward=reward_model_server, judge or remote",
        ),
        (f"{R}name=hf {R}gpu_memory_utilization=0.6", R + "gpu_memory_utilization", "always", "engine hf"),
        ("reward.reward_manager.name=prime", "reward.reward_manager.name", "always", "num_processes"),
        (f"{A}ppo_mini_batch_size=$SIZE", A + "ppo_mini_batch_size", "none", "is not a value of this key"),
        ("actor_rollout_ref.actor.clip_rati=1", A + "clip_rati", "none", f"Did you mean '{A}clip_ratio'?"),
    ],
)
def test_a_key_without_a_counterpart_has_a_reason(text, key, how, words):
    answer = answers(text)[key]

    assert answer.how == how
    assert words in answer.note


@pytest.mark.parametrize(
    ("text", "setting", "value"),
    [
        ("trainer.total_epochs=3", "trainer.epochs", 3),
        ("trainer.val_before_train=False", "eval.before_training", False),
        (f"{R}val_kwargs.top_p=0.7", "eval.top_p", 0.7),
        (f"{R}val_kwargs.top_k=-1", "eval.top_k", 0),
        (f"{A}optim.lr_warmup_steps_ratio=0.1", "optimizer.warmup_ratio", 0.1),
        (f"{R}repetition_penalty=1.1", "sampling.repetition_penalty", 1.1),
        ("trainer.resume_mode=disable", "run.resume", "never"),
    ],
)
def test_a_key_becomes_a_setting(text, setting, value):
    assert settings_of(f"{text} {R}name=hf")[setting] == value


def test_environments_and_reward_models_have_settings():
    found = settings_of(
        f"{R}multi_turn.enable=True {R}multi_turn.max_assistant_turns=4 {R}free_cache_engine=False"
        " reward_model.enable=True reward_model.model.path=/rm"
    )

    assert (found["episode.max_turns"], found["device_sharing"]) == (4, "never")
    assert (found["reward"], found["reward.model"]) == ("model", "/rm")
    config = compose(["reward=model", "reward.model=/rm"], complete=False).config
    assert ([item.name for item in config.reward.items], config.reward.model) == (["model"], "/rm")


@pytest.mark.parametrize("name", TABLES)
def test_no_note_mentions_a_version(name):
    assert [answer for answer in read_table(name).notes.values() if "this version" in answer.note] == []


def test_two_keys_with_different_values_of_one_setting_are_reported():
    found = answers(f"{A}fsdp_config.param_offload=True {A}optim.clip_grad=1.0 {A}grad_clip=0.5")

    assert found[A + "grad_clip"].how == "none"
    assert (
        "optimizer.clip_grad_norm is already 1.0, from actor_rollout_ref.actor.optim.clip_grad"
        in found[A + "grad_clip"].note
    )


def test_a_reward_function_keeps_its_options():
    text = (
        "custom_reward_function.path=/r.py custom_reward_function.name=f +custom_reward_function.reward_kwargs.scale=2"
    )

    reward = settings_of(text)["reward"]

    assert reward == "[{name: /r.py:f, scale: 2}]"
    (item,) = compose([f"reward={reward}"], complete=False).config.reward.items
    assert (item.name, item.options) == ("/r.py:f", {"scale": 2})


def test_dynamic_sampling_and_the_overlong_buffer_choose_dapo():
    text = (
        "algorithm.adv_estimator=grpo algorithm.filter_groups.enable=True algorithm.filter_groups.max_num_gen_batches=7"
        " reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.len=64"
    )

    found = settings_of(text)

    assert found["algorithm"] == "dapo"
    assert (found["algorithm.refill.rounds"], found["algorithm.overlong.tokens"]) == (7, 64)


def algorithm_of(text):
    """The config of the algorithm that comes out, as a run would build it; and the keys that have no counterpart."""
    from rlcore.config.build import build_plugin
    from rlcore.registry import resolve

    done = translate(read_launch(text))
    settings = {name: value for name, value in done.settings.items() if name.startswith("algorithm")}
    words = shlex.split(command(settings).replace("\\\n", ""))[2:]
    choice = compose(words, complete=False).config.algorithm
    config = build_plugin("algorithm", choice, resolve("algorithm", choice.name).object)
    return choice.name, config, [line.key for line in done.of("partly", "none")]


GIVEN = {
    A + "clip_ratio": 0.3, A + "clip_ratio_c": 3.0, A + "loss_agg_mode": "token-mean", A + "ppo_epochs": 1,
    A + "ppo_mini_batch_size": 256, "algorithm.norm_adv_by_std_in_grpo": True, "algorithm.gamma": 1.0,
    "algorithm.filter_groups.enable": False, A + "policy_loss.kl_cov_ratio": 0.0002,
}  # fmt: skip


@pytest.mark.parametrize("given", [{}, GIVEN], ids=["its defaults", "given"])
@pytest.mark.parametrize("loss", ["vanilla", *LOSSES])
@pytest.mark.parametrize("estimator", ["gae", *ESTIMATORS])
def test_every_estimator_with_every_loss_becomes_an_algorithm_that_accepts_it(estimator, loss, given):
    pytest.importorskip("rlcore_algorithms")
    keys = {"algorithm.adv_estimator": estimator, A + "policy_loss.loss_mode": loss, **given}
    refused = [A + "loss_agg_mode"] if loss == "gspo" and given else []
    refused += ["algorithm.gamma"] if (loss, estimator) == ("gvpo", "reinforce_plus_plus") and given else []
    refused += [A + "clip_ratio_c"] if loss.startswith("dppo") and given else []
    text = " ".join(f"{key}={value}" for key, value in keys.items())
    if (estimator == "gae" and loss != "vanilla") or (
        estimator == "reinforce_plus_plus" and loss in ("gspo", "geo_mean")
    ):
        with pytest.raises(ConfigError, match=r"loss_mode=|adv_estimator=reinforce_plus_plus: refused by rlcore"):
            translate(read_launch(text))
        return

    name, config, unsupported = algorithm_of(text)

    assert unsupported == refused
    if loss != "vanilla":
        assert name == LOSSES[loss]
    if loss == "gvpo":
        assert (config.beta, config.minibatches) == (0.1, 4)
        return
    if loss.startswith("dppo"):
        assert (config.divergence, config.limit) == (loss[-2:], 0.3 if given else 0.2)
    if name not in ("grpo", "ppo"):
        assert config.estimator == ESTIMATORS[estimator]
    if loss not in ("sapo", "gpg", "kl_cov", "dppo_tv", "dppo_kl"):
        assert (config.clip_low, config.clip_high) == ((0.3, 0.3) if given else (0.2, 0.2))
    assert config.dual_clip == (3.0 if loss == "vanilla" else 0.0)
    assert config.average == ("seq-mean-token-mean" if loss in ("gspo", "sapo", "geo_mean") else "token-mean")
    assert config.minibatches == 4
    if loss == "kl_cov":
        assert (config.share, config.penalty) == (0.0002, 0.1)


def test_a_default_that_the_algorithm_refuses_is_reported():
    done = translate(read_launch(f"algorithm.adv_estimator=grpo {A}policy_loss.loss_mode=gspo"))

    (line,) = [line for line in done.lines if line.key == A + "loss_agg_mode"]
    assert not line.given
    assert line.answer.note.startswith("refused by rlcore: algorithm.average: expected seq-mean-token-mean")
    assert "algorithm.average" not in done.settings


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rollout_is=token", ("token", "truncate", 0.0, 2.0, "none")),
        ("rollout_is=sequence {C}rollout_is_threshold=5", ("sequence", "truncate", 0.0, 5.0, "none")),
        ("rollout_is=token {C}rollout_is_threshold=0.5_5.0", ("token", "mask", 0.5, 5.0, "none")),
        ("rollout_is=token {C}rollout_is_threshold=0.5_5", ("token", "mask", 0.5, 5.0, "none")),
        ("rollout_rs=seq_mean_k3 {C}rollout_rs_threshold=0.01", ("none", "truncate", 0.0, 2.0, "mean_k3")),
        ("rollout_rs=seq_mean_k1 {C}rollout_rs_threshold=0.99_1.01", ("none", "truncate", 0.0, 2.0, "mean_k1")),
    ],
)
@pytest.mark.parametrize("estimator", ["grpo", "gae", "rloo"])
def test_a_rollout_correction_is_translated(estimator, text, expected):
    pytest.importorskip("rlcore_algorithms")
    prefix = "algorithm.rollout_correction."

    name, config, unsupported = algorithm_of(f"algorithm.adv_estimator={estimator} {prefix}{text.format(C=prefix)}")

    assert name == {"grpo": "dapo", "gae": "dual_clip_ppo", "rloo": "rloo"}[estimator]
    correction = config.correction
    found = (correction.weight, correction.beyond, correction.low, correction.high, correction.reject)
    assert found == expected
    assert unsupported == ([prefix + "rollout_rs"] if "rollout_rs" in text else [])
    if "k3" in text:
        assert correction.reject_above == 0.01
    if name == "dapo":
        assert (config.refill.rounds, config.clip_high) == (0, 0.2)


def test_an_algorithm_that_is_not_installed_is_translated_with_a_remark(monkeypatch):
    from rlcore_workbench.migration import checked

    def resolve(kind, name):
        raise ConfigError(f"no {kind} named '{name}'\nType …")

    monkeypatch.setattr(checked, "resolve", resolve)

    done = translate(read_launch("algorithm.adv_estimator=rloo data.train_files=/d"))

    assert done.settings["algorithm"] == "rloo"
    assert "settings of algorithm=rloo are not checked: no algorithm named 'rloo'" in done.remarks


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("True", True), ("false", False), ("null", None), ("3", 3), ("1e-6", 1e-6), ("-1", -1), ("abc", "abc"),
        ("'a b'", "a b"), ("[a,'b']", ["a", "b"]), ("[]", []), ("['console','wandb']", ["console", "wandb"]),
    ],
)  # fmt: skip
def test_values_are_read_as_hydra_reads_them(text, value):
    assert parse_value(text) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("python -m verl.trainer.main_ppo", "no launch found: neither a setting of verl"),
        ("data.train_files='a", "cannot be read near line 1"),
    ],
)
def test_a_launch_that_cannot_be_read_is_refused(text, words):
    with pytest.raises(UserError, match=words):
        read_launch(text)


@pytest.mark.parametrize(
    ("text", "others"),
    [
        (
            "python -m recipe.dapo.main_dapo data.train_files=/d extra.foo=1 hydra.run.dir=x --config-name=dapo",
            ["extra.foo=1", "hydra.run.dir=x", "--config-name=dapo"],
        ),
        (
            "python3 verl/trainer/main_ppo.py data.train_files=/d ~trainer.logger +mine.x=2",
            ["~trainer.logger", "+mine.x=2"],
        ),
        ("data.train_files=/d ~trainer.logger=1", ["~trainer.logger=1"]),
        ('A=(data.train_files=/d\n b.c=1 )\npython -m verl.trainer.main_ppo "${A[@]}" d=2', ["b.c=1", "d=2"]),
        ("python3 prepare.py --dir=/x\nN=2\npython3 -m verl.trainer.main_ppo trainer.nnodes=$N", []),
    ],
)
def test_arguments_that_are_not_settings_of_verl_are_reported(text, others):
    done = translate(read_launch(text))

    assert [line.key for line in done.of("none")] == others
    assert all(line.answer.note for line in done.of("none"))
    assert "$" not in str(done.settings)


def test_a_module_other_than_verls_is_reported():
    done = translate(read_launch("python -m recipe.dapo.main_dapo data.train_files=/d"))

    assert any(remark.startswith("recipe.dapo.main_dapo: its own defaults") for remark in done.remarks)


def test_a_missing_script_is_refused(tmp_path):
    with pytest.raises(UserError, match="neither a readable file nor a command"):
        main([str(tmp_path / "run.sh")])


@pytest.mark.parametrize(("more", "code"), [("", 0), (" trainer.made_up=1", 1)])
def test_the_exit_code_is_1_if_a_key_has_no_counterpart(capsys, more, code):
    assert main(["data.train_files=/d actor_rollout_ref.model.path=/m" + more]) == code


def test_the_command_can_be_pasted_into_a_shell(capsys, tmp_path):
    (tmp_path / "run.sh").write_text(SCRIPT)

    assert main([str(tmp_path / "run.sh"), "--command-only"]) == 1

    words = shlex.split(capsys.readouterr().out.replace("\\\n", ""))
    assert words[:2] == ["rlcore", "train"]
    assert "data.train=/d/a.parquet,/d/b.parquet" in words
    assert "trackers=[console,{name: wandb, project: p}]" in words
    assert not any(word.startswith("trainer.steps") for word in words)


def test_json_contains_every_key(capsys):
    main(["--json", "data.train_files=/d", "trainer.made_up=1"])

    unsupported = json.loads(capsys.readouterr().out)
    assert [(one["key"], one["how"]) for one in unsupported["keys"] if one["given"]] == [
        ("data.train_files", "set"),
        ("trainer.made_up", "none"),
    ]
    assert unsupported["settings"]["data.train"] == "/d"


def test_defaults_of_verl_are_in_the_tables():
    assert [key for key in TABLE.defaults if key not in {**TABLE.same, **RULES, **TABLE.values}] == []


PPO = "python3 -m verl.trainer.main_ppo "


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("python3 -m verl.trainer.main_eval data.path=/d", "runs verl.trainer.main_eval"),
        ("python3 -m recipe.prime.main_prime data.train_files=/d", "runs recipe.prime.main_prime"),
        ("python3 my/main.py data.train_files=/d", "runs my/main.py"),
        ("$COMMAND data.train_files=/d", r"runs \$\{COMMAND\}"),
        ("M=$(f)\npython3 -m $M data.train_files=/d", "runs an unknown module"),
        (f"{PPO} data.train_files=/d\n{PPO} data.train_files=/e", "found 2 different launches, at lines 1, 2"),
        (f"{PPO} data.train_files=/d \\\n  # a comment\n  trainer.nnodes=2", "line 3 begins with trainer.nnodes=2"),
        (f"{PPO} data.train_files=/d async_training.partial_rollout=True", "a trainer other than"),
        (f"{PPO} algorithm.adv_estimator=no_such", "no algorithm 'no_such'"),
        (f"{PPO} algorithm.adv_estimator=grpo {A}policy_loss.loss_mode=no_such", "no algorithm has the loss 'no_such'"),
        (f"{PPO} {A}strategy=veomni", "no backend 'veomni'"),
        (f"{PPO} model_engine=torchtitan trainer.nnodes=1", "no backend 'torchtitan'"),
        (f"{PPO} actor@actor_rollout_ref.actor=mlite_actor trainer.nnodes=1", "no backend 'mlite'"),
        (
            f"{PPO} trainer.nnodes=1 algorithm.adv_estimator=$(f)",
            "needs algorithm.adv_estimator, whose value could not be",
        ),
        (f"A=$(f)\n{PPO} trainer.nnodes=1 $A", "the argument .* could not be read: it is the output of a command"),
    ],
)
def test_a_launch_that_would_become_something_else_is_refused(text, words):
    with pytest.raises(ConfigError, match=re.compile(words, re.DOTALL)):
        translate(read_launch(text))


def test_supervised_fine_tuning_becomes_sft():
    text = (
        "torchrun --nnodes=1 -m verl.trainer.sft_trainer data.train_files=/d data.messages_key=messages engine=megatron"
        " engine.tensor_model_parallel_size=2 optim.lr=1e-5 model.path=/m data.max_length=2048 data.use_dynamic_bsz=True"
        " data.max_token_len_per_gpu=8192 data.train_batch_size=96 trainer.total_training_steps=100"
    )

    done = translate(read_launch(text))

    assert done.settings == {
        "data.train": "/d",
        "data.prompt_column": "messages",
        "backend": "megatron",
        "backend.tensor_parallel": 2,
        "optimizer.lr": 1e-05,
        "model.path": "/m",
        "data.max_prompt_tokens": 2048,
        "sampling.max_response_tokens": 2048,
        "model.max_tokens_per_device": 8192,
        "trainer.prompts_per_step": 96,
        "trainer.steps": 100,
        "algorithm": "sft",
        "optimizer.weight_decay": 0.01,
        "pools.main.nodes": 1,
        "pools.main.devices_per_node": 1,
        "checkpoint.every_steps": 0,
        "eval.every_steps": 0,
        "model.precision": "bfloat16",
    }
    assert [line.key for line in done.of("partly", "none")] == ["data.max_length"]


def test_generation_becomes_rlcore_rollout(capsys):
    text = (
        "python3 -m verl.trainer.main_generation data.path=/d/test.parquet data.n_samples=4 data.output_path=/o/x.parquet"
        " model.path=$HOME/m rollout.temperature=0.7 rollout.response_length=1024"
    )

    assert main([text, "--command-only"]) == 0

    words = shlex.split(capsys.readouterr().out.replace("\\\n", ""))
    assert words[:4] == ["rlcore", "rollout", "${HOME}/m", "/o/x"]
    assert {"data.train=/d/test.parquet", "sampling.samples_per_prompt=4", "sampling.max_response_tokens=1024"} < {
        *words
    }
    assert not any(word.startswith(("algorithm", "optimizer", "model.path")) for word in words)


def test_a_launch_that_only_evaluates_becomes_rlcore_eval():
    done = translate(read_launch(f"{PPO} data.val_files=/d trainer.val_only=True {M}path=/m"))

    assert done.command == ("rlcore", "eval", "/m")
    assert done.settings["data.eval"] == "/d"


FULLY_ASYNC = "python3 -m verl.experimental.fully_async_policy.fully_async_main"


@pytest.mark.parametrize(
    ("staleness", "partial", "expected", "how"),
    [
        (0, True, ("sync", None, None), "set"),
        (1, True, ("async", 1, True), "set"),
        (0.5, True, ("async", 1, True), "partly"),
        (1, False, ("async", 1, False), "set"),
        (3, True, ("async", 3, True), "set"),
    ],
)
def test_fully_asynchronous_training_becomes_a_schedule(staleness, partial, expected, how):
    prefix = "async_training."
    text = (
        f"{FULLY_ASYNC} data.train_files=/d data.train_batch_size=0 {A}ppo_mini_batch_size=16 trainer.nnodes=1"
        f" trainer.n_gpus_per_node=4 rollout.nnodes=2 rollout.n_gpus_per_node=8 rollout.total_rollout_steps=16000"
        f" {prefix}staleness_threshold={staleness} {prefix}trigger_parameter_sync_step=4 {prefix}partial_rollout={partial}"
        f" actor_rollout_ref.hybrid_engine=False {R}name=hf"
    )

    done = translate(read_launch(text))
    found = done.settings

    names = ("schedule", "schedule.steps_ahead", "schedule.in_flight_updates")
    assert tuple(found.get(name) for name in names) == expected
    assert (found["trainer.prompts_per_step"], found["algorithm.minibatches"], found["trainer.steps"]) == (64, 4, 250)
    assert (found["placement"], found["pools.actor.devices_per_node"], found["pools.rollout.nodes"]) == ("split", 4, 2)
    assert next(line for line in done.lines if line.key == prefix + "staleness_threshold").answer.how == how
    compose(shlex.split(command(found).replace("\\\n", ""))[2:], complete=False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "python3 -m verl.experimental.one_step_off_policy.main_ppo data.train_files=/d",
            {"schedule": "pipelined", "placement": "split", "pools.rollout.devices_per_node": 8},
        ),
        (
            "data.train_batch_size=64 trainer.v1.trainer_mode=separate_async trainer.v1.separate_async.parameter_sync_step=2"
            " trainer.v1.separate_async.num_warmup_batches=4 trainer.v1.sampler.max_off_policy_threshold=8",
            {"schedule": "async", "placement": "split", "trainer.prompts_per_step": 128, "schedule.steps_ahead": 2},
        ),
        (
            "data.train_batch_size=64 trainer.v1.trainer_mode=colocate_async trainer.v1.colocate_async.num_warmup_batches=1",
            {"schedule": "async", "trainer.prompts_per_step": 64, "schedule.steps_ahead": 1, "pools.main.nodes": 1},
        ),
    ],
)
def test_other_asynchronous_trainers_become_schedules(text, expected):
    assert expected.items() <= settings_of(text).items()


def test_a_renamed_key_is_reported_as_it_was_typed():
    done = translate(read_launch("torchrun -m verl.trainer.sft_trainer data.train_files=/d optim.lr=1 optim.made_up=2"))

    assert [line.key for line in done.lines if line.given] == ["data.train_files", "optim.lr", "optim.made_up"]


@pytest.mark.parametrize(
    "text",
    [
        f"{A}strategy=megatron",
        "model_engine=megatron trainer.nnodes=1",
        f"{PPO} --config-path=config --config-name='ppo_megatron_trainer.yaml' trainer.nnodes=1",
        f"{PPO} --config-name ppo_megatron_trainer trainer.nnodes=1",
        f"+{A}megatron.override_transformer_config.moe_permute_fusion=True",
    ],
)
def test_megatron_launches_stay_megatron(text):
    assert settings_of(text)["backend"] == "megatron"


def test_the_layout_of_megatron_becomes_that_of_its_backend():
    G = A + "megatron."
    text = (
        f"{A}strategy=megatron {G}tensor_model_parallel_size=2 {G}pipeline_model_parallel_size=4 {G}sequence_parallel=True"
        f" {G}virtual_pipeline_model_parallel_size=null {G}context_parallel_size=2 {G}expert_model_parallel_size=8"
        f" {G}use_distributed_optimizer=False +{G}override_transformer_config.num_layers_in_first_pipeline_stage=5"
        f" {G}override_transformer_config.recompute_granularity=selective {A}ulysses_sequence_parallel_size=4"
        f" actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2 critic.megatron.tensor_model_parallel_size=4"
    )

    found, unsupported = settings_of(text), answers(text)

    assert {name: value for name, value in found.items() if name.startswith("backend.")} == {
        "backend.tensor_parallel": 2,
        "backend.pipeline_parallel": 4,
        "backend.context_parallel": 2,
        "backend.expert_parallel": 8,
        "backend.sequence_parallel": True,
        "backend.distributed_optimizer": False,
        "backend.first_stage_layers": 5,
        "backend.recompute": "selective",
    }
    assert found["model.gradient_checkpointing"] is True
    assert unsupported["actor_rollout_ref.ref.megatron.tensor_model_parallel_size"].how == "always"
    assert unsupported["critic.megatron.tensor_model_parallel_size"].how == "none"


@pytest.mark.parametrize(
    ("size", "more", "expected"),
    [(-1, "", None), (16, "", None), (8, "", 2), (8, f" {A}ulysses_sequence_parallel_size=2", 2), (6, "", None)],
)
def test_the_size_of_shards_becomes_the_number_of_copies(size, more, expected):
    text = f"trainer.nnodes=2 trainer.n_gpus_per_node=8 {A}fsdp_config.fsdp_size={size}{more}"

    assert settings_of(text).get("backend.replicate") == expected


@pytest.mark.parametrize("part", ["param", "optimizer"])
@pytest.mark.parametrize("engine", ["fsdp_config", "megatron"])
def test_offload_between_phases_is_not_offload_during_the_update(engine, part):
    key = f"{A}{engine}.{part}_offload"

    assert answers(f"{key}=True")[key].how == "always"
    assert "device_sharing=auto" in answers(f"{key}=True")[key].note
    assert answers(f"{key}=True {R}free_cache_engine=False")[key].how == "none"
    assert not any("offload" in name for name in settings_of(f"{key}=True"))


def test_an_unreadable_key_and_its_dependents_are_listed():
    text = f"N=$(f)\n{PPO} data.train_batch_size=$N {A}ppo_mini_batch_size=64 {R}n=4"

    found = answers(text)

    assert found["data.train_batch_size"].note == "could not be read: it is the output of a command"
    assert found[A + "ppo_mini_batch_size"].note.startswith(
        "needs data.train_batch_size, whose value could not be read"
    )
    assert settings_of(text)["sampling.samples_per_prompt"] == 4
    assert not {"trainer.prompts_per_step", "algorithm.minibatches"} & settings_of(text).keys()


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        ("data.train_batch_size=0", "data.train_batch_size", "trainer.prompts_per_step"),
        ("trainer.test_freq=each_epoch", "trainer.test_freq", "expected a whole number"),
        (f"{A}strategy=megatron {M}lora_rank=8", M + "lora_rank", "megatron-core has no adapters"),
        ("trainer.nnodes=$NODES", "trainer.nnodes", "the script does not set NODES"),
    ],
)
def test_a_refused_setting_is_listed_and_not_printed(text, key, words):
    done = translate(read_launch(f"{text} {R}name=hf"))

    (line,) = [line for line in done.of("none") if line.key == key]
    assert line.answer.note.startswith("refused by rlcore: ")
    assert words in line.answer.note
    compose(shlex.split(command(done.settings).replace("\\\n", ""))[2:], complete=False)


def test_settings_of_an_unknown_engine_are_left_out():
    text = f"{R}name=trtllm {R}tensor_model_parallel_size=4"

    assert answers(text)[R + "tensor_model_parallel_size"].how == "none"
    assert not any(name.startswith("rollout") for name in settings_of(text))


@pytest.mark.parametrize(
    ("text", "key", "how", "settings"),
    [
        (f"{R}name=vllm +{R}engine_kwargs.vllm.block_size=16", R + "engine_kwargs.vllm.block_size", "set", {"rollout.engine_options.block_size": 16}),
        (f"{R}name=vllm {R}engine_kwargs.sglang.seed=3", R + "engine_kwargs.sglang.seed", "always", {}),
        (f"{M}lora_rank=8 {M}target_modules=[q]", M + "target_modules", "set", {"backend.lora_targets": ["q"]}),
        (f"{M}target_modules=[q]", M + "target_modules", "always", {}),
        (f"{A}optim.lr=1e-5 {A}optim.warmup_style=cosine {A}optim.min_lr=1e-6", A + "optim.min_lr", "set", {"optimizer.min_lr_ratio": 0.1}),
        (f"{R}enable_chunked_prefill=False", R + "enable_chunked_prefill", "set", {"rollout.engine_options.enable_chunked_prefill": False}),
        (f"{R}expert_parallel_size=1", R + "expert_parallel_size", "always", {}),
        (f"{R}max_num_batched_tokens=8192", R + "max_num_batched_tokens", "set", {"rollout.engine_options.max_num_batched_tokens": 8192}),
        (f"{R}expert_parallel_size=8", R + "expert_parallel_size", "set", {"rollout.engine_options.enable_expert_parallel": True}),
        ("data.apply_chat_template_kwargs.enable_thinking=False", "data.apply_chat_template_kwargs.enable_thinking", "set",
         {"data.chat_template_kwargs.enable_thinking": False}),
        (f"{A}loss_agg_mode=seq-mean-token-sum-norm", A + "loss_agg_mode", "partly", {"algorithm.average": "seq-mean-token-sum"}),
        (f"{A}optim.optimizer=SGD", A + "optim.optimizer", "set", {"optimizer.name": "sgd"}),
        (f"{A}strategy=fsdp {A}fsdp_config.offload_policy=True", A + "fsdp_config.offload_policy", "set", {"backend.cpu_offload": True}),
        (f"{A}entropy_from_logits_with_chunking=True", A + "entropy_from_logits_with_chunking", "always", {}),
        ("reward.reward_kwargs.max_resp_len=512", "reward.reward_kwargs.max_resp_len", "always", {}),
        (
            "ray_kwargs.ray_init.runtime_env.py_executable=x",
            "ray_kwargs.ray_init.runtime_env.py_executable",
            "partly",
            {},
        ),
    ],
)  # fmt: skip
def test_keys_are_translated(text, key, how, settings):
    answer = answers(text)[key]

    assert (answer.how, dict(answer.settings)) == (how, settings)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{A}optim.lr_decay_style=cosine", {"optimizer.schedule": "cosine", "optimizer.min_lr_ratio": 0.0}),
        (f"{A}optim.lr_scheduler_type=cosine {A}optim.min_lr_ratio=0.3", {"optimizer.min_lr_ratio": 0.3}),
        (f"{A}optim.min_lr=1e-7", {"optimizer.min_lr_ratio": None}),
        ("algorithm.use_kl_in_reward=True algorithm.kl_penalty=abs", {"algorithm.kl.estimator": "k1"}),
        (
            f"algorithm.adv_estimator=grpo {A}policy_loss.loss_mode=dppo_kl {A}clip_ratio_high=0.05 {A}clip_ratio_low=0.05",
            {"algorithm": "dppo", "algorithm.divergence": "kl", "algorithm.limit": 0.05, "algorithm.clip_low": None},
        ),
        (
            "distillation.enabled=True distillation.teacher_models.t.model_path=/t",
            {"algorithm": "distillation", "algorithm.teacher": "/t", "reward": None},
        ),
        (
            f"algorithm.adv_estimator=grpo {A}policy_loss.loss_mode=gvpo {A}gvpo_beta=0.2 {A}clip_ratio=0.1",
            {"algorithm": "gvpo", "algorithm.beta": 0.2, "algorithm.clip_low": None},
        ),
    ],
)
def test_keys_are_translated_together(text, expected):
    found = settings_of(text)

    assert {key: found.get(key) for key in expected} == expected


def test_the_text_for_an_estimator_that_is_not_known_names_the_one_that_is_used():
    found = answers("algorithm.use_kl_in_reward=True algorithm.kl_penalty=abs")["algorithm.kl_penalty"]

    assert (found.how, found.note) == ("none", "the estimators are k1, k2 and k3; k1, which has a sign, is used")


def test_the_overlong_buffer_of_reward_kwargs_is_that_of_dapo():
    text = (
        "algorithm.adv_estimator=grpo reward_model.reward_kwargs.overlong_buffer_cfg.enable=True"
        " reward_model.reward_kwargs.overlong_buffer_cfg.len=64"
    )

    assert settings_of(text)["algorithm.overlong.tokens"] == 64


def test_arguments_of_the_launcher_are_not_settings():
    text = f"uv run --frozen --extra vllm {PPO} data.train_files=/d"

    assert translate(read_launch(text)).of("none") == []


def test_bash_passes_the_printed_command_on_unchanged(capsys):
    main([f"{PPO} data.train_files=$HOME/'a b'/x.json trainer.experiment_name='q\"r`s' trainer.logger='[\"console\"]'"])

    text = capsys.readouterr().out.partition("\n\n")[0]
    done = subprocess.run(
        ["bash"],
        input='rlcore() { printf "%s\\0" "$@"; }\n' + text,
        env={"HOME": "/h"},
        capture_output=True,
        text=True,
        check=True,
    )

    words = done.stdout.split("\0")
    assert {"data.train=/h/a b/x.json", 'run.name=q"r`s', "trackers=[console]"} <= set(words)
