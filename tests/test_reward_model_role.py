"""A frozen reward model as a role: its score is the value at the end of prompt and response."""

import json
from itertools import pairwise

import pytest
import torch
from safetensors.torch import save_file

from rlcore.cli import main
from rlcore.cli.train import plan_run
from rlcore.data.batch import Batch
from rlcore.hooks import Hooks
from rlcore.quickstart import Recipe, prepare
from rlcore.testing.model import plain_model
from rlcore.trainer.launch import launch
from rlcore.trainer.step import Step
from rlcore.workers.critic import with_score_token

_RECIPE = Recipe(digits=3, warm_steps=20, warm_batch=32, train_prompts=64, eval_prompts=8)


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("assets"), _RECIPE)


@pytest.fixture(scope="module")
def reward_model(assets, tmp_path_factory):
    import shutil

    directory = tmp_path_factory.mktemp("rm") / "actor"
    shutil.copytree(assets.model, directory)
    head = torch.randn(1, _RECIPE.hidden, generator=torch.Generator().manual_seed(1))
    save_file({"value_head.weight": head}, directory / "value_head.safetensors")
    return directory


def settings(assets, tmp_path, *more):
    return [
        f"model.path={assets.model}",
        f"data.train={assets.train}",
        "runtime=local",
        "trackers=jsonl",
        f"run.directory={tmp_path}",
        "run.name=r",
        "trainer.steps=1",
        "trainer.prompts_per_step=4",
        "sampling.samples_per_prompt=2",
        "sampling.max_response_tokens=6",
        "reward.num_processes=0",
        *more,
    ]


def test_the_score_is_the_value_after_the_last_token(assets, reward_model, tmp_path):
    plan, _ = plan_run(settings(assets, tmp_path, f"reward.model={reward_model}"))
    assert [spec.name for spec in plan.rewards] == ["model"]
    run = launch(plan, Hooks([]))
    try:
        samples = run.roles.generate(run.source.take(4, Step(number=1)))
        scored = run.roles.compute_rewards(samples).local()
    finally:
        run.close({})

    from safetensors.torch import load_file

    head = load_file(reward_model / "value_head.safetensors")["value_head.weight"]
    model = plain_model(str(assets.model))
    offsets = scored.offsets().tolist()
    for i, (start, stop) in enumerate(pairwise(offsets)):
        with torch.no_grad():
            hidden = model(scored["input_ids"][start:stop][None], output_hidden_states=True).hidden_states[-1][0, -1]
        assert float(scored["model_score"][i]) == pytest.approx(float(head @ hidden), abs=2e-4)
    assert scored["reward"].tolist() == pytest.approx(scored["model_score"].tolist())


def test_a_run_learns_from_it_beside_another_reward(assets, reward_model, tmp_path, capsys):
    more = [
        f"reward.model={reward_model}",
        "reward=[{name: model, weight: 0.5}, {name: exact_match, column: prompt}]",
        f"data.eval={assets.eval}",
    ]

    assert main(["train", *settings(assets, tmp_path, *more)]) == 0

    last = json.loads((tmp_path / "r" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["reward/mean"] == pytest.approx(0.5 * last["reward/model"] + last["reward/exact_match"], abs=1e-4)
    assert main(["eval", str(tmp_path / "r"), "runtime=local", "--json"]) == 0
    assert "eval/reward" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["reward=model"], "reward 'model' asks for column 'model_score', which "),
        (
            ["reward.model={plain}"],
            "has no value_head.safetensors, so it is not a reward model\nTrain one:  rlcore train",
        ),
        (
            ["reward.model={rm}", "reward=sorted_digits"],
            "reward.model is set, but no reward uses its score\nType  reward=m",
        ),
        (["reward.model=nowhere"], "reward.model=nowhere: there is no such directory"),
    ],
)
def test_what_cannot_score_is_refused_before_the_start(assets, reward_model, tmp_path, capsys, more, text):
    given = [item.format(plain=assets.model, rm=reward_model) for item in more]

    assert main(["train", *settings(assets, tmp_path, *given)]) == 2

    assert text in capsys.readouterr().err


def test_the_score_token_is_the_last_one_again():
    batch = Batch.of(lengths=[2, 3], tokens={"input_ids": [5, 6, 7, 8, 9], "loss_mask": [False, True] + [True] * 3})

    ended = with_score_token(batch)

    assert ended["input_ids"].tolist() == [5, 6, 6, 7, 8, 9, 9]
    assert ended["loss_mask"].tolist() == [False, False, True, False, False, False, True]
