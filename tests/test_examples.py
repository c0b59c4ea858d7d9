"""The examples: GRPO in one file equals the trainer, and the example packages work when installed from wheels."""

import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlcore import hookimpl
from rlcore.cli.train import plan_run
from rlcore.hooks import Hooks
from rlcore.testing import RewardContract
from rlcore.testing.waiting import HANG_S
from rlcore.trainer.launch import launch
from rlcore.trainer.loop import train
from tests.distributions import PIP, add_third_party, build_wheels, call, make_environment

pytest.importorskip("rlcore_workbench", reason="needs plugins/rlcore-workbench: make test-plugins installs it")

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
STEPS = 3


@pytest.fixture(scope="module", autouse=True)
def _quickstart_assets():
    os.environ.setdefault("RLCORE_CACHE", str(Path.home() / ".cache" / "rlcore"))


def load_example(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class TestAnimalStory(RewardContract):
    target = f"{EXAMPLES}/animal_story.py:animal_story"
    examples = (
        ({"completion": "Two Dogs ran.", "animal": "dog"}, 1.0),
        ({"completion": "Two dogs ran", "animal": "dog", "finish_reason": "length"}, 0.7),
        ({"completion": "A dogma.", "animal": "dog"}, 0.3),
    )


class Recorder:
    """Hook that keeps the scored samples of every step."""

    def __init__(self):
        self.batches = []

    @hookimpl
    def rlcore_samples_scored(self, samples):
        self.batches.append(samples.select("input_ids", "loss_mask", "reward", "group_id", "sample_id").local())


def trained(directory, *more):
    """Run the trainer; return the model path, its samples, the mean loss of each step, and the final weights."""
    settings = ["preset=quickstart", "runtime=local", "trackers=jsonl", f"trainer.steps={STEPS}", "data.eval=''"]
    place = [f"run.directory={directory}", "run.name=r"]
    plan, _ = plan_run([*settings, *place, "trainer.prompts_per_step=16", *more])
    recorder = Recorder()
    run = launch(plan, Hooks([recorder]))
    try:
        train(run)
    finally:
        run.close({})
    lines = [json.loads(line) for line in (directory / "r" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["actor/loss"] for line in lines if "actor/loss" in line]
    weights = load_file(directory / "r" / "checkpoints" / f"step_{STEPS:06d}" / "actor" / "model.safetensors")
    return plan.config.model.path, recorder.batches, losses, weights


def padded(example, batch):
    """Convert the trainer's samples to those of the example."""
    starts, lengths = batch.offsets().tolist(), batch.lengths.tolist()
    ids = torch.zeros(len(batch), max(lengths), dtype=torch.int64)
    is_response = torch.zeros(ids.shape, dtype=torch.bool)
    for row, (start, length) in enumerate(zip(starts, lengths)):
        ids[row, :length] = batch["input_ids"][start : start + length]
        is_response[row, :length] = batch["loss_mask"][start : start + length]
    return example.Samples(ids_BL=ids, is_response_BL=is_response, reward_B=batch["reward"], group_B=batch["group_id"])


@pytest.mark.parametrize("minibatches", [1, 3], ids=["one update a step", "three updates a step"])
def test_grpo_from_scratch_matches_the_losses_and_weights_of_the_trainer(tmp_path, minibatches):
    options = [f"algorithm.minibatches={minibatches}", "optimizer.schedule=constant", "optimizer.warmup_steps=2"]
    model_path, batches, wanted_losses, wanted = trained(tmp_path, *options, "optimizer.lr=1e-3", "optimizer.eps=1e-6")
    example = load_example("grpo_from_scratch")
    settings = example.Settings(minibatches=minibatches, lr=1e-3, eps=1e-6, warmup_steps=2)
    model, _ = example.load(Path(model_path))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    schedule = example.make_optimizer(model, settings)

    losses = [
        example.update(model, schedule, padded(example, batch), step, settings) for step, batch in enumerate(batches)
    ]

    assert len(losses) == len(wanted_losses) == STEPS
    assert [sum(one) / len(one) for one in losses] == pytest.approx(wanted_losses, abs=1e-5)
    found = {name: tensor for name, tensor in model.state_dict().items() if name in wanted}
    assert found.keys() == wanted.keys()
    gap = max(float((found[name] - wanted[name]).abs().max()) for name in wanted)
    moved = max(float((before[name] - wanted[name]).abs().max()) for name in wanted)
    assert gap < 1e-5
    assert moved > 1e-3


def test_grpo_from_scratch_scores_like_the_quickstart():
    from rlcore.rewards.sorted_digits import sorted_digits

    example = load_example("grpo_from_scratch")

    for text in ("123", "132", "321", "12", "1234", "", "11 3"):
        for reason in ("stop", "length"):
            assert example.sort_reward(text, "312", reason == "stop") == sorted_digits(text, "312", reason)


def test_grpo_from_scratch_samples_and_scores_responses_to_each_prompt():
    from rlcore.quickstart import cache_directory, prepare

    example, assets = load_example("grpo_from_scratch"), prepare(cache_directory())
    model, tokenizer = example.load(assets.model)
    torch.manual_seed(0)
    rows = [{"prompt": "sort 3124=", "digits": "3124"}, {"prompt": "sort 52=", "digits": "52"}]

    samples = example.sample(model, tokenizer, rows, example.Settings(samples_per_prompt=3))

    assert samples.group_B.tolist() == [0, 0, 0, 1, 1, 1]
    prompts = [
        tokenizer.decode(ids[~mask][: ids[~mask].tolist().index(tokenizer("=")["input_ids"][0]) + 1])
        for ids, mask in zip(samples.ids_BL, samples.is_response_BL)
    ]
    assert prompts == ["sort 3124="] * 3 + ["sort 52="] * 3
    for ids, mask, reward in zip(samples.ids_BL, samples.is_response_BL, samples.reward_B.tolist()):
        response = ids[mask].tolist()
        ended = response[-1] == tokenizer.eos_token_id
        digits = "3124" if "3124" in tokenizer.decode(ids) else "52"
        assert reward == pytest.approx(
            example.sort_reward(tokenizer.decode(response[: len(response) - ended]), digits, ended)
        )


# The example packages, installed from wheels, without access to this source tree.

PACKAGES = (
    ROOT,
    *(ROOT / "plugins" / f"rlcore-{name}" for name in ("workbench", "environments")),
    *(EXAMPLES / name for name in ("reward-plugin", "algorithm-plugin", "environment-plugin")),
)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Make a virtual environment with the wheels of all PACKAGES."""
    home = tmp_path_factory.mktemp("home")
    wheels = build_wheels(PACKAGES, home)
    call(*PIP, "--python", make_environment(home), "install", "--no-index", "--no-deps", *wheels)
    add_third_party(home)
    return home


@pytest.mark.slow
def test_the_wheels_of_the_examples_work_with_list_plugins_check_and_train(home, tmp_path):
    rlcore = [home / "venv" / "bin" / "rlcore"]
    where = call(home / "venv" / "bin" / "python", "-c", "import rlcore; print(rlcore.__file__)", cwd=tmp_path)
    assert where.startswith(str(home / "venv")), "the core must come from its wheel"

    rows = json.loads(call(*rlcore, "list-plugins", "--json", cwd=tmp_path))
    found = {row["name"]: row["status"] for row in rows if row["package"].startswith("rlcore-example")}
    own = {"ascending", "countdown", "example_dpo", "calculator", "rlcore-example-calculator"}
    assert found == dict.fromkeys(own, "ok")
    for arguments in (
        ["reward", "ascending"],
        ["reward", "countdown"],
        ["algorithm", "example_dpo", "--suite", "keeps_every_sample=false"],
        ["environment", "calculator"],
    ):
        call(*rlcore, "check", *arguments, cwd=tmp_path)
    small = ["trainer.steps=2", "trainer.prompts_per_step=16", "eval.max_prompts=8", "runtime=local"]
    chosen = ["reward=ascending", "algorithm=example_dpo", "trackers=jsonl", "run.name=r"]
    call(*rlcore, "train", "preset=quickstart", *small, *chosen, cwd=tmp_path)
    last = json.loads((tmp_path / "outputs" / "r" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["reward/mean"] > 0.1
    assert {"actor/margin", "actor/accuracy"} <= set(last)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"), [("reward-plugin", 12), ("algorithm-plugin", 15), ("environment-plugin", 12)]
)
def test_the_examples_pass_their_own_tests_against_the_wheels(home, name, count, tmp_path):
    shutil.copytree(EXAMPLES / name / "tests", tmp_path / "tests")

    out = call(home / "venv" / "bin" / "python", "-m", "pytest", "-q", "-W", "error", "tests", cwd=tmp_path)

    assert out.splitlines()[-1].startswith(f"{count} passed")


@pytest.mark.slow
def test_a_tiny_model_learns_to_use_the_calculator(home, tmp_path):
    """At first about a third of the answers are right; training raises this to most of them."""
    make = "from pathlib import Path; from example_calculator.tiny import make; make(Path('tiny'))"
    call(home / "venv" / "bin" / "python", "-c", make, cwd=tmp_path, timeout=HANG_S)
    settings = ["runtime=local", "trackers=jsonl", "run.name=r", "trainer.steps=40", "eval.every_steps=0"]

    call(home / "venv" / "bin" / "rlcore", "train", "preset=calculator", *settings, cwd=tmp_path, timeout=HANG_S)

    lines = [json.loads(line) for line in (tmp_path / "outputs" / "r" / "metrics.jsonl").read_text().splitlines()]
    before, after = (line["eval/pass_rate"] for line in (lines[0], lines[-1]))
    steps = [line for line in lines if "reward/mean" in line]
    first, last = (sum(line["reward/mean"] for line in part) / 5 for part in (steps[:5], steps[-5:]))
    assert before < 0.5
    assert after > max(0.6, before + 0.2)
    assert last > first + 0.1
    assert 1.5 < steps[-1]["environment/turns"] <= 3
    assert steps[-1]["actor/rollout_logprob_gap"] < 1e-3
