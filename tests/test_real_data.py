"""Complete runs of a trained model, on word problems and on a reward that it can learn."""

import json
from pathlib import Path

import pytest
from rlcore_tests.runs import metrics
from safetensors.torch import load_file

from rlcore.cli.train import run as train
from rlcore.trainer.export import export, find_checkpoint

EXAMPLES = Path(__file__).parents[1] / "examples"


def settings(assets: Path, directory: Path, *more: str) -> list[str]:
    return [
        f"model.path={assets / 'models' / 'stories260k'}",
        "runtime=local",
        "trackers=jsonl",
        f"run.directory={directory}",
        "run.name=r",
        "reward.num_processes=0",
        *more,
    ]


def samples(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "r" / "samples.jsonl").read_text().splitlines()]


def test_gsm8k_run_prompts_scores_updates_and_exports(each_assets, tmp_path):
    """The model was trained on stories and solves none of the problems."""
    data = each_assets / "data" / "gsm8k"
    train(
        settings(
            each_assets,
            tmp_path,
            "preset=gsm8k",
            f"data.train={data / 'train.jsonl'}",
            f"data.eval={data / 'test.jsonl'}",
            "data.max_prompt_tokens=480",
            "data.overlong=drop",
            "sampling.max_response_tokens=24",
            "sampling.samples_per_prompt=2",
            "trainer.prompts_per_step=4",
            "trainer.steps=2",
            "eval.max_prompts=4",
        ),
        dry_run=False,
    )
    seen = samples(tmp_path)
    assert len(seen) == 8
    for sample in seen:
        question = sample["columns"]["question"]
        assert sample["prompt"] == f"{question}\nThink step by step, and end with: #### and the number.\n"
        assert "####" in sample["columns"]["answer"]
        assert sample["reward"] == 0.0
    checkpoint = find_checkpoint(tmp_path / "r")
    export(checkpoint, tmp_path / "model")
    before = load_file(each_assets / "models" / "stories260k" / "model.safetensors")
    after = load_file(tmp_path / "model" / "model.safetensors")
    assert before.keys() >= after.keys()
    assert (tmp_path / "model" / "tokenizer_config.json").read_bytes() == (
        each_assets / "models" / "stories260k" / "tokenizer_config.json"
    ).read_bytes()


def test_story_model_learns_to_mention_a_dog_and_stays_near_its_reference(assets, tmp_path):
    openings = ["Once upon a time", "One day", "Lily and Tom were", "There was a little girl"]
    rows = [json.dumps({"prompt": opening, "animal": "dog"}) for opening in openings]
    (tmp_path / "stories.jsonl").write_text("\n".join(rows))
    train(
        settings(
            assets,
            tmp_path,
            f"data.train={tmp_path / 'stories.jsonl'}",
            f"reward={EXAMPLES / 'animal_story.py'}:animal_story",
            "data.max_prompt_tokens=32",
            "sampling.max_response_tokens=32",
            "sampling.samples_per_prompt=24",
            "trainer.prompts_per_step=4",
            "trainer.steps=14",
            "optimizer.lr=6e-4",
            "algorithm.kl.coefficient=0.02",
        ),
        dry_run=False,
    )
    lines = metrics(tmp_path)
    rewards = [line["reward/mean"] for line in lines if "reward/mean" in line]
    assert sum(rewards[-3:]) > 1.5 * sum(rewards[:3])
    assert 0 < lines[-1]["actor/kl_to_reference"] < 1


@pytest.mark.parametrize("column", ["animal", "answer"])
def test_a_reward_whose_column_is_missing_is_refused_before_anything_starts(assets, tmp_path, column):
    (tmp_path / "stories.jsonl").write_text(json.dumps({"prompt": "One day", "anmal": "dog"}))
    reward = f"{EXAMPLES / 'animal_story.py'}:animal_story" if column == "animal" else "exact_match"
    with pytest.raises(Exception, match=column):
        train(settings(assets, tmp_path, f"data.train={tmp_path / 'stories.jsonl'}", f"reward={reward}"), dry_run=True)
