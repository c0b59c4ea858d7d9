"""The quickstart's model and data: loadable, deterministic, cached completely or not at all, and learnable."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from rlcore import quickstart
from rlcore.config.compose import compose
from rlcore.errors import ConfigError
from rlcore.quickstart import Assets, Recipe, cache_directory, locate, locate_assets, prepare
from rlcore.rewards.sorted_digits import sorted_digits

SMALL = Recipe(digits=3, hidden=32, layers=1, warm_steps=3, warm_batch=8, train_prompts=40, eval_prompts=10)


@pytest.fixture(scope="module")
def assets(tmp_path_factory) -> Assets:
    return prepare(tmp_path_factory.mktemp("cache"), SMALL)


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_prompts_name_their_digits_and_held_out_ones_are_others(assets):
    train, held_out = rows(assets.train), rows(assets.eval)

    assert (len(train), len(held_out)) == (40, 10)
    assert all(row == {"prompt": f"sort {row['digits']}=", "digits": row["digits"]} for row in train + held_out)
    assert all(len(row["digits"]) == 3 for row in train)
    assert len({row["digits"] for row in train + held_out}) == 50


def test_held_out_numbers_stay_held_out_under_another_seed(assets, tmp_path):
    other = prepare(tmp_path, Recipe(**{**as_dict(SMALL), "seed": 7, "train_prompts": 1000, "eval_prompts": 1000}))

    held_out = {row["digits"] for row in rows(other.eval)}
    assert {row["digits"] for row in rows(assets.eval)} <= held_out
    assert held_out.isdisjoint(row["digits"] for row in rows(assets.train))
    assert 90 < len(held_out) < 160


def as_dict(recipe: Recipe) -> dict[str, int]:
    return {name: getattr(recipe, name) for name in Recipe.__dataclass_fields__}


def test_tokenizer_has_one_token_per_character_and_goes_back(assets):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(assets.model)
    ids = tokenizer("sort 420=")["input_ids"]

    assert ids == [31, 27, 30, 32, 39, 7, 5, 3, 40]
    assert tokenizer.decode(ids) == "sort 420="
    assert tokenizer.decode([3, 5, 7, tokenizer.eos_token_id], skip_special_tokens=True) == "024"
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1, 2)
    assert tokenizer.chat_template is None


def test_model_is_a_tied_causal_model_with_the_end_token_of_its_tokenizer(assets):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(assets.model)

    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert (model.config.vocab_size, model.config.eos_token_id, model.generation_config.eos_token_id) == (45, 1, 1)
    assert model.config.hidden_size // model.config.num_attention_heads == 16


def test_same_recipe_makes_the_same_bytes(assets, tmp_path):
    again = prepare(tmp_path, SMALL)

    assert again.model != assets.model
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert digest(again.model / name) == digest(assets.model / name), name
    assert digest(again.train) == digest(assets.train)


def test_another_seed_makes_another_model_in_another_directory(assets):
    other = prepare(assets.model.parents[1], Recipe(**{**as_dict(SMALL), "seed": 1}))

    assert other.model != assets.model
    assert digest(other.model / "model.safetensors") != digest(assets.model / "model.safetensors")


def test_making_leaves_the_random_state_and_the_threads_alone(tmp_path):
    import torch

    torch.manual_seed(5)
    before, threads = torch.get_rng_state(), torch.get_num_threads()

    prepare(tmp_path, SMALL)

    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


def test_existing_assets_are_not_made_again(assets, monkeypatch):
    monkeypatch.setattr(quickstart, "_make", lambda *arguments: pytest.fail("made again"))

    assert prepare(assets.model.parents[1], SMALL) == assets


def test_half_written_cache_is_never_used(tmp_path, monkeypatch):
    def half(directory: Path, recipe: Recipe, progress: object) -> None:
        (directory / "train.jsonl").write_text("half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(quickstart, "_make", half)
        with pytest.raises(KeyboardInterrupt):
            prepare(tmp_path, SMALL)

    assert list(tmp_path.iterdir()) == []
    assert len(rows(prepare(tmp_path, SMALL).train)) == 40


def test_two_processes_at_once_agree(tmp_path, monkeypatch):
    """Another process finishes its assets first."""

    def slow(directory: Path, recipe: Recipe, progress: object) -> None:
        monkeypatch.setattr(quickstart, "_make", lambda directory, *rest: (directory / "train.jsonl").write_text("{}"))
        prepare(tmp_path, SMALL)
        (directory / "train.jsonl").write_text("late")

    monkeypatch.setattr(quickstart, "_make", slow)
    assets = prepare(tmp_path, SMALL)

    assert assets.train.read_text() == "{}"
    assert [path.name for path in tmp_path.iterdir()] == [assets.train.parent.name]


def test_paths_of_the_preset_become_files(tmp_path, monkeypatch):
    monkeypatch.setenv("RLCORE_CACHE", str(tmp_path))
    monkeypatch.setattr(quickstart, "Recipe", lambda: SMALL)
    told: list[str] = []

    config = locate_assets(compose(["preset=quickstart"]).config, told.append)

    assert Path(config.model.path, "config.json").is_file()
    assert config.data.train == str(Path(config.model.path).parent / "train.jsonl")
    assert Path(config.data.eval).is_file()
    assert told == [f"quickstart: model and data are in {Path(config.model.path).parent}"]


def test_other_paths_stay_as_they_are():
    assert locate("/models/some:thing") == "/models/some:thing"


def test_unknown_asset_is_refused():
    with pytest.raises(ConfigError) as caught:
        locate("quickstart:trian")

    assert str(caught.value) == (
        "there is no 'quickstart:trian'. Did you mean 'train'?\n"
        "There are: quickstart:model, quickstart:train, quickstart:eval."
    )


@pytest.mark.parametrize(
    ("variables", "directory"),
    [
        ({"RLCORE_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/rlcore"),
        ({"HOME": "/c"}, "/c/.cache/rlcore"),
    ],
    ids=["own", "xdg", "home"],
)
def test_cache_directory_follows_the_environment_variables(variables, directory, monkeypatch):
    for name in ("RLCORE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert cache_directory() == Path(directory)


def test_warm_start_teaches_the_form_of_an_answer_but_not_sorting(tmp_path):
    """At temperature 1, responses end and contain the digits, in any of the six orders."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assets = prepare(tmp_path, Recipe(digits=3, warm_steps=150, warm_batch=64, train_prompts=500, eval_prompts=100))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(assets.model), AutoTokenizer.from_pretrained(assets.model)
    held_out = rows(assets.eval)
    ids = torch.tensor(tokenizer([row["prompt"] for row in held_out])["input_ids"])
    torch.manual_seed(0)
    with torch.no_grad():
        for _ in range(4):
            ids = torch.cat([ids, torch.multinomial(model(ids).logits[:, -1].softmax(-1), 1)], dim=1)

    rewards = []
    for row, answer in zip(held_out, tokenizer.batch_decode(ids[:, 9:]), strict=True):
        completion, end, _ = answer.partition("<eos>")
        rewards.append(sorted_digits(completion, row["digits"], "stop" if end else "length"))
    assert sum(reward > 0 for reward in rewards) > 20
    assert sum(reward == 1 for reward in rewards) < 40
    assert sum(rewards) / len(rewards) < 0.3
