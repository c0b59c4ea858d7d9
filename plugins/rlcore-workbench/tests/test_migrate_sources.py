"""`rlcore migrate` for TRL, OpenRLHF and prime-rl: every key has a counterpart or a reason, and the result composes."""

import shlex
import subprocess

import pytest
from rlcore_workbench.migrate import command, translated

from rlcore.config.compose import compose
from rlcore.errors import ConfigError

PYTHON = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward

def short(completions, **kwargs):
    return [-len(it) for it in completions]

raise SystemExit("this file is not executed")
name = "Qwen/Qwen3-0.6B"
dataset = load_dataset("trl-lib/DeepMath-103K", split="train")
args = GRPOConfig(
    output_dir="out/mine", learning_rate=2e-6, num_generations=4, per_device_train_batch_size=8,
    gradient_accumulation_steps=2, generation_batch_size=64, max_steps=100, beta=0.04, epsilon_high=0.28,
    loss_type="dr_grpo", scale_rewards=False, reward_weights=[1.0, 0.5], report_to=["wandb"], project="p",
    sync_ref_model=True, made_up=3, max_completion_length=int(1e3),
)
trainer = GRPOTrainer(model=name, reward_funcs=[accuracy_reward, short], args=args, train_dataset=dataset)
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Write a file into the working directory, and return its name."""
    monkeypatch.chdir(tmp_path)

    def write(name, text):
        (tmp_path / name).write_text(text)
        return name

    return write


def settings_of(*words):
    """Return the settings, which compose, with those of the engine left out if it is not installed."""
    settings = translated(words).settings
    chosen = {key: value for key, value in settings.items() if key.partition(".")[0] not in ("rollout", "backend")}
    compose(shlex.split(command(chosen).replace("\\\n", ""))[2:], complete=False)
    return settings


def answers(*words):
    return {line.key: line.answer for line in translated(words).lines if line.given}


def test_a_python_file_is_read_and_not_executed(file):
    found = settings_of(file("train.py", PYTHON))

    expected = {
        "model.path": "Qwen/Qwen3-0.6B",
        "data.train": "trl-lib/DeepMath-103K:train",
        "run.directory": "out",
        "run.name": "mine",
        "optimizer.lr": 2e-6,
        "sampling.samples_per_prompt": 4,
        "trainer.prompts_per_step": 16,  # 64 completions, 4 per prompt
        "algorithm.minibatches": 4,  # 64 completions, 8 × 2 per optimizer step
        "trainer.steps": 25,
        "algorithm": "grpo",
        "algorithm.average": "seq-mean-token-sum",
        "algorithm.normalize_by_std": False,
        "algorithm.kl.coefficient": 0.04,
        "algorithm.kl.sync_every_steps": 128,  # 512 optimizer steps
        "algorithm.kl.sync_mix": 0.6,
        "algorithm.clip_high": 0.28,
        "reward": "[{name: trl.rewards:accuracy_reward, weight: 1.0},{name: train.py:short, weight: 0.5}]",
        "trackers": "[console,jsonl,{name: wandb, project: p}]",
        "model.precision": "bfloat16",
        "optimizer.schedule": "linear",
    }
    assert {key: found.get(key) for key in expected} == expected
    found = answers("train.py")
    unsupported = {key: it.note for key, it in found.items() if it.how == "none"}
    assert (found["loss_type"].how, "is not divided by" in found["loss_type"].note) == ("partly", True)
    assert "divide algorithm.minibatches" in found["per_device_train_batch_size"].note
    assert unsupported["made_up"].startswith("not in the table")
    assert unsupported["max_completion_length"] == "could not be read: the file computes it: int(1000.0)"


@pytest.mark.parametrize(
    ("given", "setting", "value"),
    [
        ("--loss_type cispo --epsilon_high 5", "algorithm.clip_high", 4),
        ("--loss_type sapo --sapo_temperature_neg 1.1", "algorithm.tau_negative", 1.1),
        ("--importance_sampling_level sequence", "algorithm", "gspo"),
        ("--num_processes 8 --per_device_train_batch_size=4", "trainer.prompts_per_step", 4),
        ("--num_processes 8", "pools.main.devices_per_node", 8),
        ("--use_peft --lora_target_modules q_proj v_proj", "backend.lora_targets", ["q_proj", "v_proj"]),
        ("--use_vllm --vllm_mode server --vllm_server_port 9000", "rollout.url", "http://0.0.0.0:9000"),
        ("--use_vllm", "algorithm.correction.beyond", "mask"),
        ("--reward_funcs think_format_reward a.b.c", "reward", "[{name: trl.rewards:think_format_reward, weight: 1.0},{name: a.b:c, weight: 1.0}]"),
        ("--adam_beta2 0.95", "optimizer.betas", [0.9, 0.95]),
        ("--warmup_ratio 0.1", "optimizer.warmup_ratio", 0.1),
        ("--save_strategy no", "checkpoint.every_steps", 0),
        ("--resume_from_checkpoint", "run.resume", "auto"),
        ("--use_adaptive_entropy --entropy_coef 0.01 --entropy_target 0.5", "algorithm.adaptive_entropy.target", 0.5),
        ("--use_adaptive_entropy --entropy_coef_min 0.001 --entropy_coef 0.01", "algorithm.adaptive_entropy.min", 0.001),
        ("--use_peft --use_rslora", "backend.lora_rslora", True),
        ("--use_peft", "backend.lora_rank", 16),
        ("--use_peft", "backend.lora_alpha", 32),
        ("--report_to none", "trackers", "[console,jsonl]"),
        ("--report_to None", "trackers", "[console,jsonl]"),
        ("--dataset_name a/b --dataset_config c", "data.train", "a/b:c:train"),
        ("--save_steps 8 --num_processes 1 --steps_per_generation 2", "checkpoint.every_steps", 4),
        ("--sync_ref_model --beta 0.1 --ref_model_sync_steps 4", "algorithm.kl.sync_every_steps", 4),
        ("--num_processes 4 --generation_batch_size 64", "algorithm.minibatches", 2),
    ],
)  # fmt: skip
def test_flags_of_trl_become_settings(given, setting, value):
    assert settings_of(f"trl grpo --num_generations 8 {given}")[setting] == value


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("n = 1\nn = 2\nGRPOConfig(num_generations=n)\nn = 3", "num_generations", 2),
        ("n = 1\nif X:\n    n = 2\nGRPOConfig(num_generations=n)", "num_generations", "lines 1, 3"),
        ("n = 1\nn += 1\nGRPOConfig(num_generations=n)", "num_generations", "lines 1, 2"),
        ("def f(n):\n    GRPOConfig(num_generations=n)\nn = 4", "num_generations", "computes n"),
        ("n = 4\ndef f():\n    GRPOConfig(num_generations=n)", "num_generations", 4),
        ("n = 4\nn = 5\ndef f():\n    GRPOConfig(num_generations=n)", "num_generations", "lines 1, 2"),
        ("a = GRPOConfig()\na.num_generations = 4", "num_generations", 4),
        ("a = GRPOConfig(num_generations=2)\na.num_generations = 4", "num_generations", 4),
        ("a = GRPOConfig(num_generations=2)\nif X:\n    a.num_generations = 4", "num_generations", "in a branch"),
        ("a = GRPOConfig()\na.num_generations += 4", "num_generations", "in a branch, or computes it"),
        ("if __name__ == '__main__':\n    a = GRPOConfig()\n    a.num_generations = 4", "num_generations", 4),
        ("p.add_argument('--n', default=4)\na = p.parse_args()\nGRPOConfig(num_generations=a.n)", "num_generations", 4),
        ("p.add_argument('--n', required=True)\na = p.parse_args()\nGRPOConfig(num_generations=a.n)", "num_generations", "argument --n"),
        ("p.add_argument('--n', action='store_false')\na = p.parse_args()\nGRPOConfig(bf16=a.n)", "bf16", True),
        ("r = ['a']\nr.append('b')\nGRPOConfig(report_to=r)", "report_to", "lines 1, 2"),
        ("k = {'min_lr': 1}\nk['min_lr'] = 2\nGRPOConfig(lr_scheduler_kwargs=k)", "lr_scheduler_kwargs", "lines 1, 2"),
        ("GRPOConfig('out/x')", "output_dir", "out/x"),
        ("d = load_dataset('json', data_files='x.jsonl')\nGRPOTrainer('/m', f, GRPOConfig(), d)", "dataset_name", "x.jsonl"),
        ("GRPOTrainer(eval_dataset=load_dataset('a/b', 'c', split='test'), args=GRPOConfig())", "eval_dataset", "a/b:c:test"),
    ],
)  # fmt: skip
def test_values_of_a_python_file_are_those_that_it_would_have(file, text, key, value):
    (line,) = [it for it in translated([file("a.py", text)]).lines if it.given and it.key == key]

    assert value in line.answer.note if line.answer.how == "none" else line.value == str(value)


def test_adapters_of_a_python_file_have_the_defaults_of_peft(file):
    found = settings_of(file("a.py", "GRPOTrainer(args=GRPOConfig(), peft_config=LoraConfig(lora_alpha=4))"))

    assert (found["backend.lora_rank"], found["backend.lora_alpha"]) == (8, 4)


def test_keys_with_a_reason_for_every_value_need_no_value(file):
    found = answers(file("a.py", "GRPOConfig(logging_steps=steps(), tools=[f], push_to_hub=x, learning_rate=y)"))

    assert [found[key].how for key in ("logging_steps", "push_to_hub", "learning_rate")] == ["always", "none", "none"]
    assert found["push_to_hub"].note == "upload what rlcore export writes"


def test_a_yaml_file_is_overridden_by_flags(file):
    file("grpo.yaml", "learning_rate: 1.0e-5\nmodel_name_or_path: /m\nreward_funcs:\n- accuracy_reward\n")

    alone, with_flags = settings_of("grpo.yaml"), settings_of("trl grpo --config grpo.yaml --learning_rate 2e-5")

    assert (alone["optimizer.lr"], with_flags["optimizer.lr"]) == (1e-5, 2e-5)
    assert with_flags["model.path"] == "/m"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.yaml", "output_dir: 'x$(touch pwned)'\nrun_name: 'a`touch pwned`!'\nlearning_rate: 1e-5"),
        ("x.py", "GRPOConfig(output_dir='${HOME}', run_name='a`touch pwned`!', learning_rate=1e-5)"),
        (
            "x.toml",
            "output_dir = '$(touch pwned)'\n[data]\n[monitors.wandb]\nname = 'a`touch pwned`!'\n[optim]\nlr = 1e-5\n"
            "[inference.vllm]\n'$(touch pwned)' = '$x'",
        ),
        ("x.sh", "trl grpo --output_dir '$(touch pwned)' --run_name 'a`touch pwned`!' --learning_rate 1e-5"),
        ("$(touch pwned)${HOME}.py", "def f(): pass\nGRPOTrainer(reward_funcs=f, args=GRPOConfig(run_name='a`touch pwned`!'))"),
    ],
)  # fmt: skip
def test_the_printed_command_runs_nothing_but_rlcore(file, tmp_path, name, text):
    done = translated([file(name, text)])

    printed = 'rlcore() { printf "%s\\0" "$@"; }\nset -H\n' + command(done.settings, done.command)
    ran = subprocess.run(["bash", "--norc", "-i"], input=printed, capture_output=True, text=True, check=True)

    assert not (tmp_path / "pwned").exists()
    assert "run.name=a`touch pwned`!" in ran.stdout.split("\0")
    assert not any("$" in str(value) for value in done.settings.values())


def test_only_a_variable_of_the_shell_stays_live():
    settings = {"run.name": "a${NAME}b c", "data.train": "$(x)${1}$y`z`!\"'\\${Z}"}
    echo = command(settings, ["printf", "%s\\n"])

    ran = subprocess.run(
        ["bash", "--norc"], input=echo, env={"NAME": "n m", "Z": "z"}, capture_output=True, text=True, check=True
    )

    assert ran.stdout == "run.name=an mb c\ndata.train=$(x)${1}$y`z`!\"'\\z\n"


OPENRLHF = "ray job submit -- python3 -m openrlhf.cli."


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("train_sft", {"optimizer.lr": 5e-6, "trainer.epochs": 2, "data.max_prompt_tokens": 2048, "checkpoint.keep_last": 3}),
        ("train_sft", {"data.template": "User: {input}\nAssistant: ", "data.chat": "never"}),
        ("train_sft --data.input_key q --data.apply_chat_template", {"data.prompt_column": "q"}),
        ("train_sft --data.multiturn --data.apply_chat_template", {"algorithm.turns": "all"}),
        ("train_dpo --data.dataset a/b", {"optimizer.lr": 1e-5, "data.max_prompt_tokens": 512, "data.train": "a/b:train"}),
        ("train_rm --ds.lora.rank 8", {"optimizer.lr": 9e-6, "backend.lora_rank": 8, "backend.lora_alpha": 16}),
        ("train_rm --ds.lora.rank 8 --ds.lora.target_modules q_proj v_proj", {"backend.lora_targets": ["q_proj", "v_proj"]}),
        ("train_ppo_ray", {"critic.optimizer.lr": 9e-6, "critic.optimizer.warmup_ratio": 0.03, "data.max_prompt_tokens": 2048}),
        ("train_ppo_ray --reward.model_name_or_path /r", {"reward.model": "/r", "critic.path": "/r"}),
        ("train_ppo_ray --algo.advantage.estimator rloo", {"algorithm.average": "token-mean"}),
        ("train_ppo_ray --actor.policy_loss_type gspo --algo.advantage.estimator group_norm", {"algorithm.clip_low": 0.2}),
        ("train_sft --lr_scheduler cosine", {"optimizer.min_lr_ratio": 0.0}),
        ("train_sft --min_lr_ratio 0.2", {"optimizer.min_lr_ratio": 0.2}),
        (
            "train_ppo_ray --train.colocate_all --actor.num_gpus_per_node 8 --rollout.batch_size 128 --train.batch_size 256"
            " --rollout.n_samples_per_prompt 8 --algo.advantage.estimator group_norm --algo.kl.use_loss --algo.kl.estimator k3"
            " --algo.kl.init_coef 1e-3 --actor.eps_clip_low_high 0.2 0.27 --algo.dynamic_filtering_enable"
            " --algo.dynamic_filtering_range 0 1 --reward.remote_url /r.py --data.max_len 2048 --rollout.max_new_tokens 1024",
            {
                "algorithm": "dapo",
                "algorithm.refill.rounds": 10,
                "trainer.prompts_per_step": 128,
                "algorithm.minibatches": 4,
                "algorithm.kl.where": "loss",
                "algorithm.kl.coefficient": 1e-3,
                "algorithm.clip_high": 0.27,
                "pools.main.devices_per_node": 8,
                "data.max_prompt_tokens": 1024,
                "reward": "/r.py:reward_func",
            },
        ),
        (
            "train_ppo_ray --vllm.num_engines 4 --vllm.tensor_parallel_size 2 --train.async_enable --actor.num_gpus_per_node 4",
            {
                "algorithm": "ppo",
                "placement": "split",
                "pools.actor.devices_per_node": 4,
                "pools.rollout.devices_per_node": 8,
                "schedule": "async",
                "algorithm.kl.where": "reward",
                "algorithm.lam": 1,
            },
        ),
        (
            "train_sft --data.dataset /d --data.output_key answer --adam.lr 5e-6 --train.batch_size 256 --data.max_len 2048",
            {
                "algorithm": "sft",
                "algorithm.response": "answer",
                "optimizer.lr": 5e-6,
                "trainer.prompts_per_step": 256,
                "sampling.max_response_tokens": 2048,
            },
        ),
        (
            "train_dpo --model.beta 0.1 --data.chosen_key a --model.model_name_or_path /m",
            {"algorithm": "dpo", "algorithm.beta": 0.1, "algorithm.chosen": "a", "model.path": "/m"},
        ),
        ("train_rm --model.model_name_or_path /m", {"algorithm": "reward_model"}),
    ],
)  # fmt: skip
def test_openrlhf_becomes_an_algorithm(given, expected):
    found = settings_of(OPENRLHF + given)

    assert {key: found.get(key) for key in expected} == expected
    assert ("rollout" in found) == ("ppo" in given)


def test_a_command_in_a_here_document_is_read(file):
    text = "read -r -d '' words <<EOF\nopenrlhf.cli.train_dpo \\\n   --model.beta 0.2 --data.dataset ${D}\nEOF\n"

    found = settings_of(file("a.sh", f"D=/d\n{text}if [[ $1 != slurm ]]; then\n  deepspeed --module $words\nfi"))

    assert (found["algorithm.beta"], found["data.train"]) == (0.2, "/d")


RL = """
max_steps = 20
seq_len = 2048
[model]
name = "/m"
[deployment]
num_train_gpus = 2
num_infer_gpus = 6
[orchestrator]
batch_size = 128
group_size = 16
max_off_policy_steps = 8
[orchestrator.train.sampling]
max_completion_tokens = 128
[[orchestrator.train.source]]
name = "x"
[orchestrator.train.source.env.taskset]
id = "reverse-text"
[trainer.optim]
lr = 3e-6
[trainer.model.ac]
[inference.vllm]
tensor_parallel_size = 2
block_size = 16
"""


def test_a_toml_file_of_prime_rl_becomes_an_asynchronous_run(file):
    found = settings_of(file("rl.toml", RL))

    expected = {
        "trainer.steps": 20,
        "data.max_prompt_tokens": 1920,
        "sampling.max_response_tokens": 128,
        "model.path": "/m",
        "placement": "split",
        "schedule": "async",
        "schedule.max_staleness": 8,
        "pools.actor.devices_per_node": 2,
        "pools.rollout.devices_per_node": 6,
        "trainer.prompts_per_step": 8,
        "sampling.samples_per_prompt": 16,
        "optimizer.lr": 3e-6,
        "model.gradient_checkpointing": True,
        "rollout.tensor_parallel": 2,
        "rollout.engine_options.block_size": 16,
        "optimizer.weight_decay": 0.01,
        "checkpoint.every_steps": 0,
    }
    assert {key: found.get(key) for key in expected} == expected
    (line,) = [it for key, it in answers("rl.toml").items() if key.endswith("taskset.id")]
    assert "environment=FILE.py:NAME" in line.note
    assert settings_of("uv run rl @ rl.toml --max-steps 5")["trainer.steps"] == 5


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("[deployment]\ntype = 'multi_node'\nnum_train_nodes = 2\nnum_infer_nodes = 3\nnum_infer_replicas = 2",
         {"pools.actor.nodes": 2, "pools.actor.devices_per_node": 8, "pools.rollout.nodes": 6, "pools.rollout.devices_per_node": 8}),
        ("[deployment]\ngpus_per_node = 4\nnum_train_nodes = 2\nnum_infer_nodes = 1", {"pools.rollout.devices_per_node": 4}),
        ("[deployment]\ngpus_per_node = 8\nnum_train_gpus = 3", {"pools.actor.devices_per_node": 3, "pools.rollout.devices_per_node": None}),
        ("[trainer.scheduler]\ntype = 'cosine'\nmin_lr = 3e-7\n[trainer.optim]\nlr = 3e-6",
         {"optimizer.min_lr_ratio": 0.1, "optimizer.warmup_steps": 10, "optimizer.schedule": "cosine"}),
        ("[trainer.scheduler]\ntype = 'linear'", {"optimizer.min_lr_ratio": 0.0}),
        ("[trainer.scheduler]\ntype = 'constant'\nmin_lr = 1e-7", {"optimizer.min_lr_ratio": None}),
        ("[trainer.optim]\ntype = 'sgd'", {"optimizer.name": "sgd", "optimizer.momentum": 0.9}),
        ("[trainer.model.lora]", {"backend.lora_rank": 16, "backend.lora_alpha": 32.0}),
    ],
)  # fmt: skip
def test_settings_of_prime_rl(file, given, expected):
    found = settings_of(file("rl.toml", f"[orchestrator]\nbatch_size = 8\n{given}\n"))

    assert {key: found.get(key) for key in expected} == expected


def test_two_names_of_one_key_are_both_listed(file):
    file("rl.toml", "[model]\nname = '/a'\n[trainer.model]\nname = '/b'\n[orchestrator]\nbatch_size = 8\n")

    found = answers("rl.toml")

    assert found["trainer.model.name"].settings == (("model.path", "/b"),)
    assert found["model.name"].how == "always"


def test_a_toml_file_for_sft_becomes_sft(file):
    text = (
        'max_steps = 9\n[model]\nname = "/m"\n[data]\nname = "/d"\nbatch_size = 32\nseq_len = 64\n[optim]\nlr = 2e-5\n'
    )

    found = settings_of(file("sft.toml", text))

    assert (found["algorithm"], found["data.train"], found["optimizer.lr"]) == ("sft", "/d", 2e-5)
    assert not {"rollout", "schedule"} & found.keys()


def test_only_keys_that_depend_on_an_unreadable_one_are_left_out(file):
    found = answers(file("a.py", "GRPOConfig(use_vllm=True, vllm_mode=mode(), vllm_enable_sleep_mode=True, seed=7)"))

    assert found["vllm_enable_sleep_mode"].note.startswith("needs vllm_mode, whose value could not be read")
    assert found["seed"].settings == (("run.seed", 7),)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.py", "x = (", "a.py:1 is not valid Python"),
        ("a.py", "print(1)", "a.py has no launch, not one call of GRPOConfig"),
        ("a.py", "GRPOConfig()\nGRPOConfig()", "2 calls of GRPOConfig, at lines 1, 2"),
        ("a.toml", "x = ", "a.toml is not valid TOML"),
        ("a.toml", "[project]\nname = 'x'", "a.toml has no launch of rl or sft"),
        ("a.yaml", "a: [", "a.yaml is not valid YAML"),
        ("a.yaml", "- a", "a.yaml is not a mapping"),
        ("a.sh", "echo hello", "no launch found"),
        ("a.sh", " \n", "a.sh is empty"),
        ("a.toml", "", "a.toml is empty"),
        ("a.py", "", "a.py is empty"),
    ],
)
def test_a_file_that_launches_nothing_is_refused(file, name, text, words):
    with pytest.raises(ConfigError, match=words):
        translated([file(name, text)])


def test_two_launches_of_one_trainer_are_refused():
    with pytest.raises(ConfigError, match="found 2 different launches, at lines 1, 2"):
        translated([f"{OPENRLHF}train_sft --data.dataset=/d\n{OPENRLHF}train_sft --data.dataset=/e"])
