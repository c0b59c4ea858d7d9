"""Any text for `rlcore migrate` is translated or refused with an error for the user."""

from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rlcore_workbench.migrate import command, explained, translated

from rlcore.errors import UserError

VALUES = st.one_of(
    st.sampled_from(
        ["1", "-1", "0", "1e-6", "nan", "inf", "9" * 5000, "True", "null", "[a,b]", "[]", "[[1]]", "{a: 1}", "x.py", "''",
         "$X", "${X:-1}", "$((2 * X))", "$(date)", "$((" + "(" * 300, "2020-13-45", "0b_", "a/b", "~u/x", "@", "\0", "\ud800"]
    ),
    st.text(max_size=8),
)  # fmt: skip
KEYS = st.sampled_from(
    ["data.train_files", "data.train_batch_size", "algorithm.adv_estimator", "actor_rollout_ref.actor.optim.min_lr",
     "actor_rollout_ref.actor.optim.lr", "actor_rollout_ref.actor.optim.lr_scheduler_type", "trainer.val_only",
     "algorithm.use_kl_in_reward", "algorithm.kl_penalty", "trainer.logger", "actor_rollout_ref.actor.policy_loss.loss_mode",
     "actor_rollout_ref.actor.ppo_mini_batch_size", "actor_rollout_ref.rollout.n", "algorithm.rollout_correction.rollout_is",
     "custom_reward_function.path", "actor_rollout_ref.rollout.engine_kwargs.vllm.x", "trainer.default_local_dir"]
)  # fmt: skip
FLAGS = st.sampled_from(
    ["train.batch_size", "rollout.batch_size", "algo.advantage.estimator", "algo.kl.init_coef", "data.max_len", "", "data.dataset",
     "data.input_template", "reward.model_name_or_path", "actor.eps_clip_low_high", "ckpt.output_dir", "actor.lr_scheduler"]
)  # fmt: skip
FIELDS = st.sampled_from(
    ["per_device_train_batch_size", "generation_batch_size", "max_steps", "beta", "loss_type", "report_to", "reward_funcs", "lora_r",
     "reward_weights", "num_generations", "vllm_importance_sampling_mode", "use_vllm", "lr_scheduler_kwargs", "config", "save_steps",
     "use_peft", "output_dir", "dataset_name", "num_processes", "warmup_ratio", "chat_template_kwargs", "sync_ref_model"]
)  # fmt: skip
TABLES = st.sampled_from(
    [
        "orchestrator",
        "data",
        "trainer.optim",
        "scheduler",
        "optim",
        "deployment",
        "orchestrator.train.sampling",
        "model",
        "inference.vllm",
    ]
)
NAMES = st.sampled_from(
    ["batch_size", "group_size", "seq_len", "min_lr", "lr", "type", "num_infer_nodes", "num_infer_replicas", "gpus_per_node", "name",
     "max_completion_tokens", "subsets", "splits", "betas1"]
)  # fmt: skip
SHELL = st.sampled_from(
    ["if [ $A -gt 1 ]; then", "fi", "for i in 1 2; do", "done", "A=$((A + ", "A=(1 2)", "\"${A[@]}\"", "case $A in", "a) b;;", "esac",
     "f() {", "}", "read -r -d '' A <<EOF", "EOF", "$A", "&& # c", "true &&", "\\", "exit", "unset A", "[[ -z ", "]]", "${A:?x}", "${#A}",
     "export A=1", "A+=(x)", "| tee x", "! true", "rl", "rl @", "rl @ x.toml", "trl grpo", "trl grpo --config", "python3 -m",
     "python3 -m verl.trainer.main_ppo", "python3 -m openrlhf.cli.train_ppo_ray", "python3 -m openrlhf.cli.train_sft"]
)  # fmt: skip
CALLS = st.sampled_from(["GRPOConfig", "GRPOTrainer", "LoraConfig", "x", "x.y", "load_dataset", "import x", "for x in"])
EXPRESSIONS = st.one_of(
    st.sampled_from(
        ["x", "{[]: 1}", "-'a'", "x.y", "*x", "lambda: x", "(" * 150 + ")" * 150, "1 + x", "f'{x}'", "[x, 'a']", "None"]
    ),
    VALUES.map(repr),
)
TOML = st.sampled_from(
    ["1", "0", "-1", "1.5", "true", "'a'", "[]", "['a']", "{}", "[{a=1}]", "nan", "2020-13-45", "9" * 5000, "'$x'"]
)

VERL = st.builds("{}={}".format, KEYS, VALUES)
FLAG = st.builds("--{} {}".format, FLAGS | FIELDS, VALUES) | st.builds("--{}={}".format, FLAGS | FIELDS, VALUES)
SCRIPTS = st.lists(st.one_of(SHELL, VERL, FLAG, st.just("\n")), max_size=12).map(" ".join)
LAUNCHES = st.builds(
    lambda program, words: f"{program} {' '.join(words)}",
    st.sampled_from(["python3 -m verl.trainer.main_ppo", "python3 -m openrlhf.cli.train_ppo_ray", "trl grpo"]),
    st.lists(VERL | FLAG, max_size=8),
)
PYTHON = st.lists(
    st.builds("{}({}={})".format, CALLS, FIELDS, EXPRESSIONS)
    | st.builds("x = GRPOConfig({}={}, {}={})".format, FIELDS, EXPRESSIONS, FIELDS.map("other_{}".format), EXPRESSIONS)
    | st.builds("x.{} = {}".format, FIELDS, EXPRESSIONS)
    | st.builds("x = {}".format, EXPRESSIONS)
    | st.text(max_size=10),
    max_size=5,
).map("\n".join)
SECTIONS = st.lists(
    st.builds("[{}]\n{} = {}".format, TABLES, NAMES, TOML)
    | st.builds("[[{}]]\n{} = {}".format, TABLES, NAMES, TOML)
    | st.text(max_size=8),
    max_size=6,
).map("\n".join)
YAML = st.lists(st.builds("{}: {}".format, FIELDS, VALUES), max_size=6).map("\n".join)


def translate(words):
    """Translate and print, as the command does; the only error is one for the user."""
    with suppress(UserError):
        done = translated(words)
        assert command(done.settings, done.command)
        assert explained(done)


@settings(max_examples=40, deadline=None)
@given(st.one_of(SCRIPTS, LAUNCHES, st.text(max_size=30)))
def test_commands(text):
    translate([text])


@pytest.mark.parametrize(
    ("suffix", "texts"), [(".sh", SCRIPTS | LAUNCHES), (".py", PYTHON), (".toml", SECTIONS), (".yaml", YAML)]
)
def test_files(tmp_path, suffix, texts):
    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(texts)
    def check(text):
        path = tmp_path / f"x{suffix}"
        path.write_bytes(text.encode("utf-8", "replace"))
        translate([str(path)])

    check()


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.py", "x\0", "a.py:1"),
        ("a.py", f"x = {'(' * 250}{')' * 250}", "a.py:1"),
        ("a.toml", f"x = {'9' * 5000}", "a.toml is not valid TOML"),
        ("a.toml", f"x = {'[' * 2000}{']' * 2000}", "a.toml is not valid TOML"),
        ("a.yaml", "a: 2020-13-45", "a.yaml is not valid YAML"),
        ("a.sh", "if true; then\n  x\n", "near line"),
        ("a.sh", "if true; then\n" * 400 + "x\n" + "fi\n" * 400, "nested too deeply"),
        ("a.sh", "rl", "no launch found"),
        ("a.sh", "trl grpo --config $(x)", "could not be read"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_place(tmp_path, name, text, words):
    path = tmp_path / name
    path.write_text(text)

    with pytest.raises(UserError, match=words):
        translated([str(path)])
