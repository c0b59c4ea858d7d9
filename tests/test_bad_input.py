"""Bad input on the command line: exit code 2, the problem, what to type, no traceback and no hang."""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
from pathlib import Path

import pytest

from rlcore.cli import main

PROMPTS = ["Once upon a time", "One day", "Lily and Tom were", "There was a little girl"]
REWARDS = """
import time
from rlcore import hookimpl
from rlcore.errors import ConfigError


def length(completion):
    return float(len(completion))


def about(completion, animal):
    return 1.0


def raises(completion, sample_id):
    if sample_id % 2:
        raise KeyError("grade")
    return 1.0


def nan(completion, sample_id):
    return float("nan") if sample_id % 2 else 1.0


def text(completion, sample_id):
    return "good" if sample_id % 2 else 1.0


def hangs(completion, sample_id):
    if sample_id % 2:
        time.sleep(60)
    return 1.0


def never(completion):
    return float("nan")


class Guard:
    @hookimpl
    def rlcore_configure(self, config):
        raise ConfigError("trainer.steps is over the budget\\nType  trainer.steps=1")


class Clash:
    @hookimpl
    def rlcore_collect_metrics(self, run, step):
        return {"mine": 1.0, "reward/mean": 0.25}
"""


class World:
    """Folder with data, rewards and runs, and the command line in this process."""

    def __init__(self, folder: Path, model: Path, capsys) -> None:
        self.folder, self.model, self._capsys = folder, model, capsys
        (folder / "rewards.py").write_text(REWARDS)
        self.data("good.jsonl", *[{"prompt": prompt, "answer": "a"} for prompt in PROMPTS])

    def data(self, name: str, *lines: object) -> Path:
        path = self.folder / name
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return path

    def copied_model(self) -> Path:
        return Path(shutil.copytree(self.model, self.folder / "model"))

    def settings(self, *more: str) -> list[str]:
        base = [
            f"model.path={self.model}",
            f"data.train={self.folder}/good.jsonl",
            f"reward={self.folder}/rewards.py:length",
            "runtime=local",
            "trackers=jsonl",
            f"run.directory={self.folder}/runs",
            "run.name=r",
            "trainer.steps=1",
            "trainer.prompts_per_step=2",
            "sampling.samples_per_prompt=2",
            "sampling.max_response_tokens=4",
            "data.max_prompt_tokens=32",
            "reward.timeout_s=2",
        ]
        given = {item.partition("=")[0] for item in more}
        typed = [item.replace("{here}", str(self.folder)) for item in more if not item.endswith("=<left out>")]
        return [*(item for item in base if item.partition("=")[0] not in given), *typed]

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """Run a command; return the exit code, stdout and stderr."""
        self._capsys.readouterr()
        code = main(list(arguments))
        done = self._capsys.readouterr()
        return code, done.out, done.err

    def train(self, *more: str) -> tuple[int, str, str]:
        return self.run("train", *self.settings(*more))

    def refused(self, *arguments: str) -> tuple[str, str]:
        """Run a command that must be refused; return the two lines of the error."""
        code, _, said = self.run(*arguments)
        assert code == 2, said
        assert "Traceback" not in said
        first, second, *_ = [*said.splitlines(), ""]
        assert first.startswith("error: ")
        assert second, "a second line says what to type"
        return first.removeprefix("error: "), second

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last step."""
        return json.loads((self.folder / "runs" / "r" / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.fixture
def world(tmp_path, assets, capsys):
    return World(tmp_path, assets / "models" / "stories260k", capsys)


NAMES = [
    ("algorithm=grppo", "no algorithm named 'grppo'. Did you mean 'grpo'?", "Installed algorithm plugins: "),
    ("backend=lokal", "no backend named 'lokal'. Did you mean 'local'?", "Installed backend plugins: "),
    ("rollout=hff", "no rollout named 'hff'. Did you mean 'hf'?", "Installed rollout plugins: "),
    ("reward=gsm8", "no reward named 'gsm8'. Did you mean 'gsm8k'?", "Installed reward plugins: "),
    ("trackers=consol", "no tracker named 'consol'. Did you mean 'console'?", "Installed tracker plugins: console"),
    ("data.dataset=fils", "no dataset named 'fils'. Did you mean 'files'?", "Installed dataset plugins: files"),
    ("transfer=inproces", "no transfer named 'inproces'. Did you mean 'inprocess'?", "Installed transfer plugins: "),
    ("plugins.hooks=[nope]", "no hooks named 'nope'.", "plugins.hooks=[my_package.my_module:MyHooks]"),
    ("preset=quikstart", "no preset named 'quikstart'. Did you mean 'quickstart'?", "There are: gsm8k, quickstart."),
    ("placement=splitt", "no placement named 'splitt'. Did you mean 'split'?", "There are: colocated, split."),
    ("runtime=lcal", "expected one of ray, local; got 'lcal'. Did you mean 'local'?", "Type  runtime.name=ray"),
    ("trainer.step=3", "trainer.step: no such setting. Did you mean 'steps'?", "Settings of trainer: steps, epochs, "),
    ("trainr.steps=3", "trainr.steps: no such setting. Did you mean 'trainer'?", "Settings: preset, model, data, "),
    ("algorithm.epoch=2", "algorithm.epoch: no such setting. Did you mean 'epochs'?", "Settings of algorithm: epochs"),
    ("placement.actr=main", "placement.actr: no role 'actr' in this run. Did you mean 'actor'?", "Roles: actor, "),
    ("placement.actor=mian", "placement.actor=mian: no pool 'mian'. Did you mean 'main'?", "pools.mian.devices_per_node=1"),
    ("steps", "'steps' is not key=value", "Type  steps=VALUE"),
    ("run.seed=${nope}", "run.seed: Interpolation key 'nope' not found", "${model.path}"),
    ("model.path=<left out>", "model.path is required", "Type  model.path=DIR"),
    ("data.train=<left out>", "data.train is required", "Type  data.train=train.jsonl"),
    ("reward=<left out>", "no reward is chosen.", "Type  reward=exact_match"),
    ("reward={here}/reward.py:length", "there is no file {here}/reward.py. Did you mean '{here}/rewards.py'?", "Write  reward="),
    ("reward={here}/rewards.py:lenght", "no 'lenght' in it. Did you mean 'length'?", "It defines: length, about, "),
    ("reward={name: number, tolerance: x}", "reward.items[0].tolerance: expected a number, got 'x'", "reward.items='[{name: NAME, tolerance: 0.0}]'"),
    ("reward={name: gsm8k, method: foo}", "reward.items[0].method: expected one of strict, flexible", "method: strict}]'"),
    ("reward=[{name: number, weight: x}]", "reward.items[0].weight: expected a number", "weight: 1.0}]'"),
    ("reward={name: number, colum: a}", "reward 'number' has no option 'colum'. Did you mean 'column'?", "Its options: column, tolerance"),
    ("reward={here}/rewards.py:about", "asks for column 'animal', which {here}/good.jsonl does not have.", "answer, prompt"),
]  # fmt: skip


@pytest.mark.parametrize(("typed", "wrong", "to_type"), NAMES, ids=[case[0] for case in NAMES])
def test_an_unknown_name_is_refused_with_the_nearest_and_the_list(world, typed, wrong, to_type):
    first, second = world.refused("train", *world.settings(typed))

    assert wrong.replace("{here}", str(world.folder)) in first
    assert to_type in second
    assert not (world.folder / "runs").exists(), "nothing was started"


VALUES = [
    ("trainer.steps=abc", "expected a whole number, got 'abc'", "trainer.steps=100"),
    ("trainer.steps=1.5", "expected a whole number, got 1.5", "trainer.steps=100"),
    ("trainer.steps=", "expected a whole number, got ''", "trainer.steps=100"),
    ("trainer.steps=-1", "expected 0 or more, got -1", "trainer.steps=100"),
    ("data.shuffle=maybe", "expected true or false, got 'maybe'", "data.shuffle=true"),
    ("sampling.stop=5", "expected a list, got 5", "sampling.stop=[a,b]"),
    ("sampling.top_p=2", "expected more than 0 and at most 1, got 2.0", "sampling.top_p=1.0"),
    ("sampling.temperature=nan", "expected 0 (greedy) or more, got nan", "sampling.temperature=1.0"),
    ("model.precision=float8", "expected one of float32, bfloat16; got 'float8'", "model.precision=float32"),
    ("model.max_tokens_per_device=0", "expected 1 or more, got 0", "model.max_tokens_per_device=16384"),
    ("optimizer.lr=fast", "expected a number, got 'fast'", "optimizer.lr=1e-06"),
    ("optimizer.lr=-1", "expected 0 or more, got -1.0", "optimizer.lr=1e-06"),
    ("optimizer.lr=inf", "expected 0 or more, got inf", "optimizer.lr=1e-06"),
    ("critic.optimizer.clip_grad_norm=-1", "expected 0 or more, got -1.0", "critic.optimizer.clip_grad_norm=1.0"),
    ("optimizer.warmup_ratio=3", "expected a number from 0 to 1, got 3.0", "optimizer.warmup_ratio=0.03"),
    ("optimizer.momentum=0.9", "expected 0 without name=sgd, got 0.9", "optimizer.momentum=0"),
    ("optimizer.name=adam", "expected one of adamw, sgd; got 'adam'. Did you mean 'adamw'?", "optimizer.name=adamw"),
    ("optimizer.betas=[0.9,1]", "expected two numbers from 0 to below 1", "optimizer.betas=[0.9,0.999]"),
    ("data.overlong=dorp", "expected one of error, drop, truncate; got 'dorp'. Did you mean 'drop'?", "data.overlong=error"),
    ("pools.main.devices_per_node=0", "expected 1 or more, got 0", "pools.main.devices_per_node=1"),
    ("algorithm.clip_low=-1", "expected 0 or more, got -1.0", "algorithm.clip_low=0.2"),
]  # fmt: skip


@pytest.mark.parametrize(("typed", "wrong", "to_type"), VALUES, ids=[case[0] for case in VALUES])
def test_a_value_of_the_wrong_kind_is_refused_with_its_key_and_an_example(world, typed, wrong, to_type):
    first, second = world.refused("train", *world.settings(typed))

    assert first.startswith(f"{typed.partition('=')[0]}: {wrong}")
    assert second == f"Type  {to_type}"


def cut(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])


def lacks_a_shard(model: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


MODELS = {
    "is not there": (shutil.rmtree, "there is no such directory", "hf download OWNER/NAME --local-dir DIR"),
    "is empty": (lambda m: (shutil.rmtree(m), m.mkdir()), "has no config.json", "See  ls "),
    "has no weights": (lambda m: (m / "model.safetensors").unlink(), "has no *.safetensors", "save_pretrained(NEW_DIR)"),
    "has pickled weights": (
        lambda m: (m / "model.safetensors").rename(m / "pytorch_model.bin"),
        "has no *.safetensors; it has pytorch_model.bin, which rlcore does not unpickle",
        "save_pretrained(NEW_DIR)",
    ),
    "lacks a shard": (lacks_a_shard, "lacks 1 of its weight files, the first is model-00002-of-00002", "hf download"),
    "has half of its weights": (lambda m: cut(m / "model.safetensors"), "model.safetensors has ", "hf download"),
    "has weights without a header": (
        lambda m: (m / "model.safetensors").write_bytes(struct.pack("<Q", 2**60) + bytes(100)),
        "model.safetensors is not a safetensors file",
        "hf download",
    ),
    "has no tokenizer": (lambda m: (m / "tokenizer.json").unlink(), "has no tokenizer", "Copy the tokenizer files"),
    "has a broken tokenizer": (lambda m: cut(m / "tokenizer.json"), "has a tokenizer that cannot be loaded", "hf download"),
    "has a broken config": (lambda m: cut(m / "config.json"), "config.json", "hf download"),
}  # fmt: skip


@pytest.mark.parametrize("dry", [["--dry-run"], []], ids=["dry run", "run"])
@pytest.mark.parametrize(("damage", "wrong", "to_type"), MODELS.values(), ids=list(MODELS))
def test_a_model_directory_that_cannot_be_used_is_refused_before_the_start(world, damage, wrong, to_type, dry):
    model = world.copied_model()
    damage(model)

    first, second = world.refused("train", *world.settings(f"model.path={model}"), *dry)

    assert str(model) in first
    assert wrong in first
    assert to_type in second
    assert not (world.folder / "runs").exists()


def test_a_model_that_is_not_there_has_its_nearest_neighbor_named(world):
    model = world.copied_model()

    first, _ = world.refused("train", *world.settings(f"model.path={world.folder}/modle"))

    assert first.endswith(f"there is no such directory. Did you mean '{model}'?")


def nest(depth: int) -> dict:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return {"x": value}


GOOD = {"prompt": "One day"}
DATA = {
    "a column that is not there": ("data.prompt_column=promt", [GOOD], "no column 'promt'. Did you mean 'prompt'?", "It has: "),
    "no column for the prompt": ("", [{"story": "a"}], "d.jsonl has none of the columns prompt, messages", "prompt_column=<name>"),
    "a template without its column": ("data.template={qestion}", [{"question": "a"}], "Did you mean 'question'?", "It has: "),
    "an empty prompt": ("", [GOOD, {"prompt": ""}], "d.jsonl:2: the prompt (from prompt) is empty", "Fill it, or remove"),
    "a prompt that is null": ("", [GOOD, {"prompt": None}], "d.jsonl:2: the prompt (from prompt) is empty", "Fill it"),
    "half of a character": ("", [GOOD, {"prompt": "a\ud83d"}], "d.jsonl:2: the prompt has the character", "or remove the row"),
    "deep nesting": ("", [GOOD, {"prompt": "a"} | nest(900)], "d.jsonl:2: nests lists and objects more than 64", "as text"),
    "a broken line": ("", [GOOD, "", '{"prompt": "a"'], "d.jsonl:3: not valid JSON", "Correct the line or remove it"),
    "a line that is a list": ("", [GOOD, "[1]"], "d.jsonl:2: a list, not an object", "Correct the line or remove it"),
    "no rows": ("", [""], "d.jsonl has no rows", "Remove it from the list"),
    "overlong prompts": (
        "data.max_prompt_tokens=4",
        [GOOD, {"prompt": "One day, a little girl"}],
        "1 of 2 prompts have more than data.max_prompt_tokens=4 tokens; the first is {here}/d.jsonl:2",
        "data.overlong=truncate, or data.overlong=drop",
    ),
    "a prompt beyond the model's context": (
        "data.max_prompt_tokens=9999",
        [GOOD, {"prompt": "One day " * 999}],
        "{here}/d.jsonl: its longest prompt has ",
        "data.overlong=drop",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("more", "lines", "wrong", "to_type"), DATA.values(), ids=list(DATA))
def test_data_that_cannot_be_used_is_refused_with_file_and_line(world, more, lines, wrong, to_type):
    world.data("d.jsonl", *lines)

    first, second = world.refused("train", *world.settings("data.train={here}/d.jsonl", *filter(None, [more])))

    assert wrong.replace("{here}", str(world.folder)) in first
    assert to_type in second
    assert not (world.folder / "runs").exists()


def test_half_of_a_character_in_a_logged_column_does_not_end_the_run(world):
    world.data("d.jsonl", *[{"prompt": prompt, "note": ["a\ud83d"], "\udc00": "b"} for prompt in PROMPTS])

    code, _, said = world.train("data.train={here}/d.jsonl")

    assert code == 0, said
    (sample, *_) = (world.folder / "runs" / "r" / "samples.jsonl").read_text().splitlines()
    assert json.loads(sample)["columns"] == {"note": ["a\\ud83d"], "\\udc00": "b"}


def test_half_of_a_character_in_the_samples_of_an_evaluation_is_written_as_its_escape(world):
    world.data("d.jsonl", *[{"prompt": prompt, "note": "a\ud83d"} for prompt in PROMPTS])

    code, _, said = world.run(
        "eval", str(world.model), f"data.eval={world.folder}/d.jsonl", f"reward={world.folder}/rewards.py:length",
        "runtime=local", "sampling.max_response_tokens=4", "--samples", f"{world.folder}/s.jsonl",
    )  # fmt: skip

    assert code == 0, said
    assert json.loads((world.folder / "s.jsonl").read_text().splitlines()[0])["columns"] == {"note": "a\\ud83d"}


def test_held_out_data_is_checked_before_the_start_too(world):
    world.data("eval.jsonl", GOOD, "{")

    first, _ = world.refused("train", *world.settings("data.eval={here}/eval.jsonl"))

    assert first.startswith(f"{world.folder}/eval.jsonl:2: not valid JSON")
    assert not (world.folder / "runs").exists()


def test_a_file_that_is_not_there_has_its_nearest_neighbor_named(world):
    first, second = world.refused("train", *world.settings("data.train={here}/god.jsonl"))

    assert first == f"no such file: '{world.folder}/god.jsonl' in '{world.folder}'. Did you mean 'good.jsonl'?"
    assert second.startswith("Write a .jsonl, .json, .csv, .parquet or .arrow file")


@pytest.mark.parametrize(("overlong", "kept"), [("drop", 1), ("truncate", 4)])
def test_overlong_prompts_are_dropped_or_truncated_and_counted(world, overlong, kept):
    # "One day" has 4 tokens, the three others have more
    code, out, _ = world.train("data.max_prompt_tokens=4", f"data.overlong={overlong}", "--dry-run")

    assert code == 0
    word = "dropped" if overlong == "drop" else "truncated"
    assert f"good.jsonl: {kept} prompts (3 {word} as too long)" in out


STATUS = {"raises": "error", "nan": "error", "text": "error", "hangs": "timeout"}
SAID = {
    "raises": "KeyError: 'grade' (rewards.py:",
    "nan": "returned nan, not a finite number",
    "text": "returned 'good' (str), not a number, None or RewardResult",
    "hangs": "no answer within 2 s",
}


@pytest.mark.parametrize("reward", STATUS)
def test_a_reward_that_fails_ends_the_run_and_names_the_sample(world, reward):
    code, _, said = world.train(f"reward={{here}}/rewards.py:{reward}")

    first, second = said.splitlines()
    assert code == 1
    assert first.startswith(f"error: reward '{reward}' on sample 1 of prompt ")
    assert SAID[reward] in first
    assert first.endswith("(2 of 4 samples have no reward)")
    assert second.endswith("drop such samples: reward.on_error=drop")


# Two prompts with two samples each; the samples with odd ids fail, the others score 1.
@pytest.mark.parametrize(("on_error", "mean"), [("zero", (1 + 0 + 1 + 0) / 4), ("drop", (1 + 1) / 2)])
@pytest.mark.parametrize("reward", STATUS)
def test_a_reward_that_fails_is_counted_and_told_when_the_run_goes_on(world, caplog, reward, on_error, mean):
    code, _, said = world.train(f"reward={{here}}/rewards.py:{reward}", f"reward.on_error={on_error}")

    metrics = world.metrics()
    counts = {name: metrics[f"reward/num_{name}"] for name in ("score", "skip", "timeout", "error")}
    assert code == 0, said
    assert counts == {"score": 2, "skip": 0, "timeout": 0, "error": 0} | {STATUS[reward]: 2}
    assert metrics["reward/mean"] == mean
    assert metrics[f"reward/{reward}"] == 1.0, "its own mean is over its scores"
    (told,) = [record.getMessage() for record in caplog.records if "have no reward" in record.getMessage()]
    assert told.startswith("2 of 4 samples have no reward: ")
    assert SAID[reward] in told


def test_a_step_without_any_reward_is_told_and_changes_nothing(world, caplog):
    code, _, _ = world.train("reward={here}/rewards.py:never", "reward.on_error=drop")

    assert code == 0
    assert "reward/mean" not in world.metrics()
    assert world.metrics()["reward/num_error"] == 4
    assert "no sample of this step has a reward; nothing is learned from it" in caplog.text


def test_steps_that_learn_nothing_end_the_run(world):
    code, _, said = world.train(
        "reward={here}/rewards.py:never", "reward.on_error=drop", "trainer.steps=9", "trainer.max_skipped_steps=2"
    )

    assert code == 1
    assert "2 steps in a row changed nothing: no sample of the last one has a reward" in said
    assert "trainer.max_skipped_steps=20" in said
    assert world.metrics()["step"] == 2


@pytest.mark.parametrize("on_error", ["raise", "drop"])
def test_a_reward_that_fails_in_an_evaluation_is_told(world, caplog, on_error):
    code, _, said = world.run(
        "eval", str(world.model), f"data.eval={world.folder}/good.jsonl", f"reward={world.folder}/rewards.py:never",
        f"reward.on_error={on_error}", "runtime=local", "sampling.max_response_tokens=4",
    )  # fmt: skip

    told = said if on_error == "raise" else caplog.text
    assert code == (1 if on_error == "raise" else 0)
    assert told.count("reward 'never' on sample") == 1


def test_a_run_directory_that_cannot_be_made_is_refused(world):
    first, second = world.refused("train", *world.settings("run.directory=/proc/nope"))

    assert first.startswith("/proc/nope/r cannot be written")
    assert second == "Type  run.directory=DIR"


def test_a_batch_that_does_not_divide_works(world):
    # 5 prompts of 4 in the data, 3 samples each, in 4 mini-batches
    code, _, said = world.train(
        "trainer.prompts_per_step=5", "sampling.samples_per_prompt=3", "algorithm.minibatches=4"
    )

    assert code == 0, said
    assert world.metrics()["reward/num_score"] == 15
    assert world.metrics()["actor/updates"] == 4


CORES = len(os.sched_getaffinity(0))
TOO_MUCH = {
    "two hosts": (["pools.main.nodes=2"], "1 devices × 1 cores = 1 CPU on each of 2 nodes; the cluster has "),
    "many cores": (["pools.main.devices_per_node=3", "pools.main.cpus_per_device=999"],
                   "3 devices × 999 cores = 2997 CPU on each of 1 nodes; the cluster has "),
    "two pools": (["placement=split", f"pools.actor.cpus_per_device={CORES}"], "(other pools also need some: "),
}  # fmt: skip


@pytest.mark.parametrize("dry", [["--dry-run"], []], ids=["dry run", "run"])
@pytest.mark.parametrize(("more", "arithmetic"), TOO_MUCH.values(), ids=list(TOO_MUCH))
def test_pools_larger_than_the_machine_are_refused_before_ray_starts(world, more, arithmetic, dry, monkeypatch):
    monkeypatch.setattr("ray.init", lambda *arguments, **options: pytest.fail("Ray was started"))

    first, second = world.refused("train", *world.settings("runtime=ray", *more), *dry)

    assert arithmetic in first
    assert second.startswith("Request less:  pools.")
    assert not (world.folder / "runs").exists()


def test_address_without_a_cluster_is_refused_before_ray_starts(world, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"  # nobody listens there any more
    monkeypatch.setattr("ray.init", lambda *arguments, **options: pytest.fail("Ray was started"))

    first, second = world.refused("train", *world.settings("runtime=ray", f"runtime.address={address}"))

    assert first.startswith(f"runtime.address={address}: no Ray cluster responds there")
    assert "ray start --head" in second


@pytest.mark.parametrize(
    ("typed", "wrong", "to_type"),
    [
        ("pools.main.python=/nowhere/python", "there is no such interpreter", "pools.main.python=VENV/bin/python"),
        ("pools.main.device=cuda", "sees no GPU", "pools.main.device=auto"),
        ("pools.main.devices_per_node=2", "runtime=local trains in one process", "runtime=ray"),
    ],
)
def test_a_pool_that_cannot_be_is_refused(world, monkeypatch, typed, wrong, to_type):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    first, second = world.refused("train", *world.settings(typed))

    assert wrong in first
    assert to_type in second


def test_a_run_directory_that_cannot_be_written_is_refused(world):
    (world.folder / "file").touch()

    first, second = world.refused("train", *world.settings("run.directory={here}/file"), "--dry-run")

    assert first == f"run.directory={world.folder}/file cannot be written"
    assert second == "Type  run.directory=DIR"


def test_resume_must_without_a_checkpoint_is_refused(world):
    first, second = world.refused("train", *world.settings("run.resume=must"))

    assert first == (f"run.resume=must, but there is no complete checkpoint in {world.folder}/runs/r/checkpoints.")
    assert second == "Type  run.resume=auto  to start from the beginning if there is none."


def test_resume_must_names_the_run_that_was_meant(world):
    (world.folder / "runs" / "stories").mkdir(parents=True)

    first, _ = world.refused("train", *world.settings("run.resume=must", "run.name=storys"))

    assert first.endswith("Did you mean run.name=stories?")


@pytest.fixture
def trained(world):
    """Return a world that contains a run of one step."""
    code, _, said = world.train()
    assert code == 0, said
    return world


def deeper_model(folder: Path, like: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    target = Path(shutil.copytree(like, folder / "other"))
    config = LlamaConfig.from_pretrained(like)
    config.num_hidden_layers = 2
    LlamaForCausalLM(config).save_pretrained(target)
    return target


def test_a_checkpoint_of_another_model_is_refused(trained):
    other = deeper_model(trained.folder, trained.model)

    code, _, said = trained.train(f"model.path={other}", "trainer.steps=2")

    assert code == 2
    assert "is a checkpoint of another model: " in said
    assert said.splitlines()[-1] == "Type the model.path that the run started with."


@pytest.mark.parametrize(
    ("lines", "wrong"),
    [
        ([{"prompt": p} for p in PROMPTS[::-1]], "the prompts differ from those of the checkpoint"),
        ([{"prompt": p} for p in PROMPTS[1:]], "the checkpoint was made with 4 prompts; the dataset has 3 now"),
    ],
    ids=["another order", "fewer"],
)
def test_prompts_of_another_data_set_are_refused_on_resume(trained, lines, wrong):
    trained.data("other.jsonl", *lines)

    first, second = trained.refused("train", *trained.settings("data.train={here}/other.jsonl", "trainer.steps=2"))

    assert wrong in first
    assert "or start a new run with run.name=<another name>" in second


def test_an_algorithm_whose_roles_the_checkpoint_lacks_is_refused_before_the_start(trained):
    first, second = trained.refused("train", *trained.settings("algorithm=ppo", "trainer.steps=2"), "--dry-run")

    assert first.endswith("step_000001 has no state of role 'critic': it was trained with algorithm=grpo")
    assert second == "Type  algorithm=grpo   or start a new run:  run.name=NAME"


def test_a_refused_resume_leaves_run_and_checkpoint_as_they_were(trained):
    run = trained.folder / "runs" / "r"
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    trained.data("other.jsonl", {"prompt": "One day"})

    trained.refused("train", *trained.settings("data.train={here}/other.jsonl", "trainer.steps=2"))

    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("arguments", "wrong", "to_type"),
    [
        (["{here}/runs/rr"], "there is no directory {here}/runs/rr. Did you mean '{here}/runs/r'?", "outputs/RUN"),
        (["{here}/runs/r"], "no held-out prompts are given.", "Type  data.eval=FILE"),
        (["{here}"], "{here} contains no checkpoint", "outputs/RUN"),
        (["{here}/runs/r", "data.eval={here}/god.jsonl"], "Did you mean 'good.jsonl'?", "Write a .jsonl"),
        (["{here}/runs/r", "data.eval={here}/good.jsonl", "eval.max_prompt=3"], "Did you mean 'max_prompts'?", "Settings"),
        (["{here}/runs/r", "data.eval={here}/good.jsonl", "model.path=/x"], "model.path is given twice", "Leave out one"),
        (["{model}", "data.eval={here}/good.jsonl", "runtime=local"], "no reward is chosen.", "Type  reward="),
        (["{here}/runs/r", "--samples", "{here}/good.jsonl/s.jsonl"], "cannot be written", "Type  --samples FILE"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_eval_refuses_what_it_cannot_score(trained, arguments, wrong, to_type):
    fill = {"{here}": str(trained.folder), "{model}": str(trained.model)}
    for mark, text in fill.items():
        arguments, wrong = [it.replace(mark, text) for it in arguments], wrong.replace(mark, text)

    first, second = trained.refused("eval", *arguments)

    assert wrong in first
    assert to_type in second


@pytest.mark.parametrize(
    ("arguments", "wrong", "to_type"),
    [
        (["{here}/runs/rr", "{here}/new"], "Did you mean '{here}/runs/r'?", "outputs/RUN/checkpoints/step_000100"),
        (["{here}", "{here}/new"], "{here} contains no checkpoint", "outputs/RUN/checkpoints/step_000100"),
        (["{here}/runs/r", "{here}/runs"], "{here}/runs already exists", "rm -r {here}/runs"),
        (["{here}/runs/r", "{here}/new", "--role", "actr"], "no role 'actr'. Did you mean 'actor'?", "Roles with a model: actor"),
        (["{here}/runs/r", "{here}/good.jsonl/new"], "cannot be written: Not a directory", "Give another directory."),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_export_refuses_what_it_cannot_write(trained, arguments, wrong, to_type):
    filled = [it.replace("{here}", str(trained.folder)) for it in (*arguments, wrong, to_type)]

    first, second = trained.refused("export", *filled[:-2])

    assert filled[-2] in first
    assert filled[-1] in second
    assert not (trained.folder / "new").exists()


def test_export_refuses_a_checkpoint_that_lost_a_file(trained):
    checkpoint = trained.folder / "runs" / "r" / "checkpoints" / "step_000001"
    (checkpoint / "actor" / "model.safetensors").unlink()

    first, second = trained.refused("export", str(trained.folder / "runs" / "r"), str(trained.folder / "new"))

    assert first == f"{checkpoint} is not a complete checkpoint: actor/model.safetensors is missing"
    assert second == f"Complete ones:  ls {checkpoint.parent}"


def test_a_hook_that_refuses_the_settings_is_named(world):
    first, second = world.refused("train", *world.settings("plugins.hooks=[{here}/rewards.py:Guard]"))

    assert first == f"rlcore_configure of {world.folder}/rewards.py:Guard: trainer.steps is over the budget"
    assert second == "Type  trainer.steps=1"


def test_a_hook_may_not_give_a_metric_of_the_core(world):
    first, second = world.refused("train", *world.settings("plugins.hooks=[{here}/rewards.py:Clash]"))

    assert first.startswith(
        f"rlcore_collect_metrics of {world.folder}/rewards.py:Clash: 'reward/mean' (0.25) is a metric of rlcore itself"
    )
    assert f"remove {world.folder}/rewards.py:Clash from plugins.hooks" in second


@pytest.mark.parametrize(("asked", "times"), [(5, 1), (4, 0)])
def test_steps_that_must_repeat_a_prompt_are_warned_of(world, caplog, asked, times):
    code, _, _ = world.train(f"trainer.prompts_per_step={asked}", "--dry-run")

    assert code == 0
    assert caplog.text.count("trainer.prompts_per_step=5 is more than the 4 prompts of") == times


@pytest.mark.parametrize(("samples", "times"), [(1, 1), (2, 0)])
def test_groups_of_one_sample_are_warned_of_once(world, caplog, samples, times):
    code, _, _ = world.train(f"sampling.samples_per_prompt={samples}", "trainer.steps=2")

    assert code == 0
    assert caplog.text.count("algorithm 'grpo' compares the samples of a prompt, but there is only one") == times


def test_the_traceback_is_shown_when_it_is_asked_for(world):
    code, _, said = world.train("trainer.step=3", "--traceback")

    assert code == 2
    assert said.startswith("Traceback (most recent call last):")
    assert "ConfigError: trainer.step: no such setting. Did you mean 'steps'?" in said


TRACKERS = """
class Full:
    Config = None
    method = "log"
    where = 3

    def __init__(self, config, run): ...
    def start(self, config, *, resume_step): self.told("start", resume_step or 0)
    def log(self, step, metrics): self.told("log", step)
    def log_samples(self, step, samples): self.told("log_samples", step)
    def finish(self, summary): self.told("finish", 3)

    def told(self, method, step):
        if (method, step) == (self.method, self.where):
            raise OSError(28, "No space left on device")


class AtTheStart(Full):
    method, where = "start", 0


class WithSamples(Full):
    method = "log_samples"


class AtTheEnd(Full):
    method = "finish"


class AtTheEndToo(Full):
    def told(self, method, step):
        if step == 3:
            raise OSError(28, "No space left on device")
"""


def full(world, name: str, *more: str) -> tuple[int, list[str]]:
    (world.folder / "trackers.py").write_text(TRACKERS)
    code, _, said = world.train(
        f"trackers=[jsonl,{world.folder}/trackers.py:{name}]", "trainer.steps=5", "run.resume=auto", *more
    )
    return code, said.splitlines()


@pytest.mark.parametrize("name", ["Full", "WithSamples", "AtTheEndToo"])
def test_a_tracker_that_cannot_write_ends_the_run_and_loses_no_step(world, name):
    code, said = full(world, name)

    assert code == 1
    assert said == [
        f"error: tracker '{world.folder}/trackers.py:{name}' failed at step 3: OSError: [Errno 28] No space left on device",
        "Fix it or remove it from  trackers=[...] , and resume with the same command and  run.name=r",
        f"the checkpoint of step 3 is in {world.folder}/runs/r/checkpoints",
    ]
    assert [path.name for path in (world.folder / "runs" / "r" / "checkpoints").iterdir()] == ["step_000003"]
    code, _, said = world.train("trainer.steps=4")
    assert code == 0, said
    assert world.metrics()["step"] == 4


def test_a_tracker_that_cannot_start_ends_the_run_with_its_name(world):
    code, (first, second) = full(world, "AtTheStart")

    assert code == 1
    assert first.startswith(f"error: tracker '{world.folder}/trackers.py:AtTheStart' failed at the start: OSError: ")
    assert second.startswith("Fix it or remove it")


def test_a_tracker_that_cannot_finish_is_named_after_a_run_that_is_complete(world):
    code, (first, _) = full(world, "AtTheEnd")

    assert code == 1
    assert first.startswith(f"error: tracker '{world.folder}/trackers.py:AtTheEnd' failed at the end: OSError: ")
    assert world.metrics()["step"] == 5
    assert (world.folder / "runs" / "r" / "checkpoints" / "step_000005").is_dir()


def test_a_full_disk_under_the_metrics_ends_the_run_with_one_message(world, monkeypatch):
    from rlcore.trackers.jsonl import JSONLTracker

    write = JSONLTracker._write

    def write_to_a_full_disk(self, path, record):
        if record["step"] == 1:
            self._files[path].close()
            self._files[path] = open("/dev/full", "a")  # noqa: SIM115
        write(self, path, record)

    monkeypatch.setattr(JSONLTracker, "_write", write_to_a_full_disk)

    code, _, said = world.train()

    assert code == 1
    assert said.splitlines()[0].endswith("OSError: [Errno 28] No space left on device")
    assert "Traceback" not in said
    assert (world.folder / "runs" / "r" / "checkpoints" / "step_000001").is_dir()
