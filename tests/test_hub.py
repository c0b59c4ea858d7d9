"""Models and data sets by their names on the Hugging Face hub, from a local cache without a network."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from rlcore.data.files import FileDataset
from rlcore.data.hub import is_hub_name, local_model
from rlcore.errors import DataError, UserError
from rlcore.testing.waiting import HANG_S

ROWS = [{"prompt": f"Count to {n}.", "answer": str(n)} for n in range(6)]


@pytest.fixture
def cache(tmp_path, assets):
    """Return the environment of a process with a cache that has one model and one data set with two splits."""
    snapshot = tmp_path / "hub" / "models--some-team--tiny" / "snapshots" / "0123abcd"
    shutil.copytree(assets / "models" / "stories260k", snapshot)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("0123abcd")
    settings = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    return {name: value for name, value in os.environ.items() if not name.startswith("HF_")} | settings


def rlcore(cache, tmp_path, *settings):
    words = [sys.executable, "-m", "rlcore", "train", "--dry-run", "runtime=local", "reward=exact_match", *settings]
    done = subprocess.run(words, env=cache, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S)
    return done.returncode, done.stdout, done.stderr


def test_a_model_in_the_cache_is_used_without_a_network(cache, tmp_path):
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    code, out, err = rlcore(cache, tmp_path, "model.path=some-team/tiny", "data.train=t.jsonl")

    assert code == 0, err
    assert f"model.path=some-team/tiny is {tmp_path}/hub/models--some-team--tiny/snapshots/0123abcd\n" in out


def test_a_model_that_is_not_there_is_refused_with_what_to_do(cache, tmp_path):
    code, _, err = rlcore(cache, tmp_path, "model.path=some-team/tyni", "data.train=t.jsonl")

    assert code == 2
    first, second = err.strip().splitlines()
    assert first.startswith(
        "error: model.path=some-team/tyni: there is no such directory, and no model of this name can be"
    )
    assert second.endswith("hf download some-team/tyni --local-dir DIR  elsewhere, and  model.path=DIR")


def test_only_a_text_that_cannot_be_a_path_is_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()

    assert [is_hub_name(it) for it in ("openai/gsm8k", "openai/gsm8k:main:train", "a/b:c")] == [True] * 3
    for path in ("data/train", "train", "a/b/c", "/a/b", "~/a", "a/b:c:d:e", "./a", "../a/b"):
        assert not is_hub_name(path)
        assert local_model(path, "model.path", print) == path
    with pytest.raises(DataError, match=r"no such file: 'some-team/t.jsonl'; there is no directory"):
        FileDataset("some-team/t.jsonl")


def test_without_the_package_its_name_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)

    with pytest.raises(UserError) as raised:
        FileDataset("openai/gsm8k")
    assert str(raised.value) == (
        "no such file: 'openai/gsm8k'; reading it from the Hugging Face hub needs the Python package 'datasets', which is"
        " not installed\nType  pip install 'rlcore[hub]'"
    )


@pytest.fixture
def cached_data(cache, tmp_path):
    """Return the environment with the data set some-team/numbers in the cache, with two splits."""
    datasets = pytest.importorskip("datasets")
    files = {split: str(tmp_path / f"{split}.jsonl") for split in ("train", "test")}
    for file in files.values():
        with open(file, "w") as stream:
            stream.writelines(json.dumps(row) + "\n" for row in ROWS)
    builder = datasets.load_dataset_builder("json", data_files=files, cache_dir=str(tmp_path / "built"))
    builder.download_and_prepare()
    target = tmp_path / "datasets" / "some-team___numbers" / "default" / "0.0.0" / "0123abcd"
    shutil.copytree(builder.cache_dir, target)
    for file in target.glob("json-*.arrow"):
        file.rename(file.with_name(file.name.replace("json-", "numbers-")))
    return cache


SCRIPT = """
from rlcore.data.files import FileDataset
from rlcore.errors import UserError

for name in ("", ":train", ":default:test", ":trian"):
    try:
        print(len(FileDataset("some-team/numbers" + name)))
    except UserError as error:
        print(error)
try:
    FileDataset("some-team/letters")
except UserError as error:
    print(error)
"""


def test_a_data_set_in_the_cache_is_read_without_a_network_or_refused_with_what_to_type(cached_data, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=cached_data, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S
    )

    assert done.returncode == 0, done.stderr
    several, type_one, train, test, no_split, type_split, no_data, type_data = done.stdout.splitlines()
    assert several == "'some-team/numbers' has several splits: train, test"
    assert type_one == "Type one of them:  some-team/numbers:train"
    assert [train, test] == ["6", "6"]
    assert no_split.startswith(
        "no such file: 'some-team/numbers:trian', and it cannot be read from the Hugging Face hub: "
    )
    assert "Should be one of ['train', 'test']" in no_split
    assert type_split.startswith("Type  some-team/numbers:SPLIT  or  some-team/numbers:CONFIG:SPLIT.")
    assert no_data.startswith("no such file: 'some-team/letters', and it cannot be read from the Hugging Face hub: ")
    assert type_data.endswith(
        "hf download --repo-type dataset some-team/letters --local-dir DIR  elsewhere, and give its files."
    )
