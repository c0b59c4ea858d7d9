"""Unusable configs are refused with one message: circular references, YAML bombs, huge numbers, impossible names."""

from __future__ import annotations

import time

import pytest

from rlcore.cli import main
from rlcore.config.compose import compose
from rlcore.errors import ConfigError
from rlcore.testing.waiting import HANG_S

HEAD = "# @package _global_\n"
LONG = "x" * 300


def bomb(levels: int) -> str:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, levels)]
    return HEAD + "placement:\n" + "".join(f"  {line}\n" for line in lines)


FILES = {
    "names itself": ({"it": "defaults: [it, _self_]\n"}, "its defaults list leads back to itself"),
    "names another that names it": (
        {"it": "defaults: [other, _self_]\n", "other": "defaults: [it, _self_]\n"},
        "its defaults list leads back to itself",
    ),
    "nests deeply": ({"it": f"placement: {'[' * 5000}{']' * 5000}\n"}, "nests too deeply"),
    "multiplies by aliases": ({"it": bomb(12)}, "stands for more than 100,000 values"),
    "contains itself": ({"it": "placement: &a {x: *a}\n"}, "stands for more than 100,000 values"),
    "has a number of 5000 digits": ({"it": f"trainer: {{steps: {'9' * 5000}}}\n"}, "Exceeds the limit"),
    "has a huge hexadecimal number": ({"it": f"trainer: {{steps: 0x{'f' * 5000}}}\n"}, "below 2**63, got one of 20000 bits"),
    "has half of a character": ({"it": 'data: {system: "a\\ud83db"}\n'}, r"data.system: 'a\ud83db' has the character '\ud83d'"),
    "has a zero character": ({"it": 'model: {path: "a\\0b"}\n'}, r"model.path: 'a\x00b' has the character '\x00'"),
    "has half of a character in a list": ({"it": 'sampling: {stop: ["\\udc00"]}\n'}, "sampling.stop: "),
    "has half of a character in a name": ({"it": 'pools: {"\\udc00": {}}\n'}, r"'pools.\udc00' has the character"),
}  # fmt: skip


@pytest.mark.parametrize(("files", "message"), FILES.values(), ids=list(FILES))
def test_a_preset_that_cannot_be_composed_is_refused(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / f"{name}.yaml").write_text(text if text.startswith(HEAD) else HEAD + text)
    began = time.monotonic()

    with pytest.raises(ConfigError) as caught:
        compose([f"preset={tmp_path}/it.yaml"], complete=False)

    first, second, *_ = str(caught.value).splitlines()
    assert message in first
    assert second
    assert time.monotonic() - began < HANG_S


def test_a_preset_may_use_aliases(tmp_path):
    text = "sampling: {stop: &stop [a, b]}\npools: {main: &pool {nodes: 2}, other: {<<: *pool, devices_per_node: 3}}\n"
    (tmp_path / "it.yaml").write_text(HEAD + text)

    config = compose([f"preset={tmp_path}/it.yaml"], complete=False).config

    assert (config.pools["other"].nodes, config.pools["other"].devices_per_node) == (2, 3)


VALUES = {
    "run.seed=" + "1" * 27: "run.seed: expected a whole number below 2**63, got one of 87 bits",
    "run.seed=" + "9" * 5000: "cannot be read: Exceeds the limit",
    "optimizer.warmup_steps=" + "9" * 20: "expected a whole number below 2**63, got one of 67 bits",
    "trainer.prompts_per_step=100000000000": "expected a number from 1 to 1,000,000, got 100000000000",
    "sampling.samples_per_prompt=100000000000": "expected a number from 1 to 1,000,000, got 100000000000",
    "eval.samples_per_prompt=100000000000": "expected a number from 1 to 1,000,000, got 100000000000",
    "reward.num_processes=1000000000": "expected a number from 0 to 4,096, got 1000000000",
    f"run.name={LONG}": "run.name: expected a printable name of 1 to 200 bytes without '/', which run.directory is for, got 'xxx",
    f"run.name={'ü' * 101}": "run.name: expected a printable name",
    "run.name=a\nb": r"run.name: expected a printable name of 1 to 200 bytes without '/', which run.directory is for, got 'a\nb'",
    "data.train=a\udcff": r"data.train: 'a\udcff' has the character '\udcff'",
}


@pytest.mark.parametrize("typed", VALUES, ids=lambda it: ascii(it[:40]))
def test_a_value_that_no_run_could_use_is_refused(typed):
    with pytest.raises(ConfigError) as caught:
        compose([typed], complete=False)

    first, second, *_ = str(caught.value).splitlines()
    assert VALUES[typed] in first
    assert second


@pytest.mark.parametrize(
    "typed",
    [f"model.path={LONG}", f"data.train={LONG}", f"preset={LONG}.yaml", f"reward={LONG}.py:f", f"run.directory={LONG}"],
    ids=lambda it: it.partition("=")[0],
)
def test_a_path_that_is_too_long_for_the_file_system_is_refused(typed, tmp_path, assets, capsys):
    model = assets / "models" / "stories260k"
    (tmp_path / "t.jsonl").write_text('{"prompt": "One day"}\n')
    given = {
        "model.path": model,
        "data.train": tmp_path / "t.jsonl",
        "reward": "exact_match",
        "run.directory": tmp_path,
    }
    settings = [f"{name}={value}" for name, value in given.items() if not typed.startswith(f"{name}=")]

    code = main(["train", "--dry-run", "runtime=local", *settings, typed])

    first, second, *_ = capsys.readouterr().err.splitlines()
    assert code == 2
    assert first.startswith("error: ")
    assert "xxx" in first
    assert second


def test_a_setting_that_asks_for_more_memory_than_there_is_ends_with_a_message(monkeypatch, capsys):
    def exhaust(*_, **__):
        raise MemoryError

    monkeypatch.setattr("rlcore.config.compose.compose", exhaust)

    code = main(["train", "trainer.prompts_per_step=1000000"])

    assert code == 1
    assert capsys.readouterr().err.startswith("error: this machine has no more memory for this process\n")


def test_an_empty_model_path_is_refused_by_its_name(tmp_path, capsys):
    (tmp_path / "t.jsonl").write_text('{"prompt": "One day"}\n')

    assert main(["train", "--dry-run", "model.path=", f"data.train={tmp_path}/t.jsonl", "reward=exact_match"]) == 2

    assert capsys.readouterr().err == "error: model.path is empty\nType  model.path=DIR\n"


def test_a_run_is_named_after_the_class_of_an_algorithm_in_a_file(tmp_path):
    from rlcore.api.run import _new_name

    config = compose([f"algorithm={tmp_path}/mine.py:Mine"], complete=False).config
    long = compose([], complete=False).config

    assert _new_name(config, []).startswith("Mine-")
    assert len(_new_name(long, [f"preset={LONG}.yaml"])) < 200
