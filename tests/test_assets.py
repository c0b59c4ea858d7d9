"""The generated model and word problems: made without a network, shared by test runs, and realistic enough."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rlcore_tests import assets as module
from rlcore_tests.assets import made_assets, real_assets
from rlcore_tests.texts import write_problem, write_story

from rlcore.models.load import load_model, load_tokenizer
from rlcore.rewards.match import GSM8K, GSM8KConfig
from rlcore.testing.waiting import HANG_S
from tests.distributions import environment


def test_assets_need_no_folder_outside_the_checkout(tmp_path):
    program = "from rlcore_tests import assets; assets._make = print; print(assets.real_assets(), assets.made_assets())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(
            Path(module.__file__).parents[1],
            RLCORE_TEST_ASSETS=str(tmp_path / "none"),
            RLCORE_CACHE=str(tmp_path / "cache"),
        ),
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=True,
    )

    assert done.stdout.splitlines()[-1].startswith(f"None {tmp_path}/cache/test-assets-")


def test_assets_are_made_once(tmp_path, monkeypatch):
    monkeypatch.setenv("RLCORE_CACHE", str(tmp_path))
    calls = []
    monkeypatch.setattr(module, "_make", calls.append)

    assert made_assets() == made_assets()
    assert len(calls) == 1


def test_other_sources_make_other_assets(tmp_path, monkeypatch):
    monkeypatch.setenv("RLCORE_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "_make", lambda directory: None)
    first = made_assets()
    changed = tmp_path / "texts.py"
    changed.write_text("# another recipe")
    monkeypatch.setattr(module.texts, "__file__", str(changed))

    assert made_assets() != first


@pytest.mark.parametrize("missing", ["models/stories260k", "data/gsm8k"])
def test_incomplete_folder_with_real_assets_is_not_used(missing, tmp_path, monkeypatch):
    for name in ("models/stories260k", "data/gsm8k"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setenv("RLCORE_TEST_ASSETS", str(tmp_path))
    assert real_assets() == tmp_path

    (tmp_path / missing).rmdir()

    assert real_assets() is None


def test_story_model_continues_a_story_and_ends_it(assets):
    path = str(assets / "models" / "stories260k")
    model, tokenizer = load_model(path), load_tokenizer(path)
    held_out = [write_story(random.Random(seed)) for seed in range(1000, 1020)]
    ids = [torch.tensor([[*tokenizer(text).input_ids, tokenizer.eos_token_id]]) for text in held_out]

    with torch.no_grad():
        losses = [float(model(input_ids=row, labels=row).loss) for row in ids]

    assert sum(losses) / len(losses) < 0.7  # nats per token; a flat distribution has log(512) = 6.2


def test_story_tokenizer_writes_words_as_tokens_and_unknown_characters_as_bytes(assets):
    tokenizer = load_tokenizer(str(assets / "models" / "stories260k"))

    assert tokenizer.convert_ids_to_tokens(tokenizer("Once upon a time").input_ids) == [
        "<s>",
        "▁Once",
        "▁upon",
        "▁a",
        "▁time",
    ]
    assert tokenizer.decode(tokenizer("7 é 中\n").input_ids, skip_special_tokens=True) == "7 é 中\n"


def test_word_problems_are_right_and_in_the_format_of_gsm8k(assets):
    lines = (assets / "data" / "gsm8k" / "train.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]

    assert len({row["question"] for row in rows}) == len(rows) == 200
    grade = GSM8K(GSM8KConfig())
    for row in rows:
        steps = row["answer"].split("<<")[1:]
        assert all(eval(step.partition("=")[0]) == int(step.partition("=")[2].partition(">>")[0]) for step in steps)
        assert grade(completion=row["answer"], answer=row["answer"]) == 1.0


def test_same_seed_writes_the_same_texts():
    assert write_problem(random.Random(3)) == write_problem(random.Random(3))
    assert write_story(random.Random(3)) == write_story(random.Random(3)) != write_story(random.Random(4))
