"""Damage of checkpoints: every changed bit is found before anything is loaded, and the checkpoint before is used."""

import errno
import json
import random
import shutil

import pytest
from rlcore_tests.runs import metrics, small_run

from rlcore.cli import main
from rlcore.errors import InfrastructureError, RunError, UserError
from rlcore.trainer.checkpoint import Checkpoints, newest, read_checkpoint
from rlcore.trainer.manifest import NAME, damage, write_manifest

EVERY_STEP = ("algorithm=ppo", "checkpoint.every_steps=1", "checkpoint.keep_last=3", "schedule=pipelined")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the parent directory of a run of four steps with a critic and samples ahead; tests must not change it."""
    folder = tmp_path_factory.mktemp("whole")
    assert main(["train", *small_run(folder, *EVERY_STEP, "placement=split", steps=4)]) == 0
    return folder


def files(checkpoint):
    return sorted(str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file())


def flip(file, chance):
    """Change one bit of a file."""
    data = bytearray(file.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    file.write_bytes(data)


def test_every_flipped_bit_is_found(whole, tmp_path):
    before = whole / "r" / "checkpoints" / "step_000003"
    parts = {name.partition("/")[0] for name in files(before)}
    assert parts > {"actor", "critic", "trainer.json", NAME}, "and the samples ahead"

    for seed in range(10):
        chance = random.Random(seed)
        for name in files(before):
            copy = shutil.copytree(before, tmp_path / f"step_{seed:06}", dirs_exist_ok=True)
            assert damage(copy, checksums=True) is None
            flip(copy / name, chance)
            assert damage(copy, checksums=True) is not None, (seed, name)
            with pytest.raises(UserError, match="is not a complete checkpoint: "):
                read_checkpoint(copy)


@pytest.mark.parametrize("name", ["actor/model.safetensors", "critic/optimizer.moments", "trainer.json", NAME])
def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(whole, tmp_path, name, caplog):
    run = shutil.copytree(whole, tmp_path / "cut", ignore=shutil.ignore_patterns("report")) / "r"
    flip(run / "checkpoints" / "step_000004" / name, random.Random(1))

    assert main(["train", *small_run(tmp_path / "cut", *EVERY_STEP, "placement=split", steps=5)]) == 0
    assert main(["train", *small_run(tmp_path / "two", *EVERY_STEP, "placement=split", steps=5)]) == 0

    assert metrics(tmp_path / "cut") == metrics(tmp_path / "two")
    assert f"{run}/checkpoints/step_000004 is not complete (" in caplog.text
    assert "step_000004 is damaged: it is now step_000004.damaged" in caplog.text
    assert newest(run / "checkpoints", checksums=True).step == 5


def test_a_file_of_another_step_is_found(whole, tmp_path):
    checkpoints = shutil.copytree(whole / "r" / "checkpoints", tmp_path / "c")
    other, own = (checkpoints / f"step_00000{step}" / "actor" / "model.safetensors" for step in (3, 4))
    assert other.stat().st_size == own.stat().st_size

    shutil.copy(other, own)

    found = damage(checkpoints / "step_000004", checksums=True)
    assert found.startswith("actor/model.safetensors has changed since it was written: its checksum is ")


def test_a_manifest_lists_every_file_and_one_without_files_is_refused(whole, tmp_path):
    copy = shutil.copytree(whole / "r" / "checkpoints" / "step_000004", tmp_path / "step_000004")
    manifest = json.loads((copy / NAME).read_text())
    assert sorted([*manifest["files"], NAME]) == files(copy)

    (copy / NAME).write_text(json.dumps({"step": 4, "files": {}}))

    assert damage(copy, checksums=True) == f"{NAME} is broken: it has no trainer.json"


def test_a_changed_step_is_found(whole, tmp_path):
    copy = shutil.copytree(whole / "r" / "checkpoints" / "step_000004", tmp_path / "step_000004")
    state = json.loads((copy / "trainer.json").read_text())
    (copy / "trainer.json").write_text(json.dumps({**state, "step": 3}))
    (copy / NAME).unlink()
    write_manifest(copy, 4)

    assert damage(copy, checksums=True) == f"trainer.json is of step 3, and {NAME} of step 4"


def test_a_manifest_of_an_earlier_version_has_sizes_only(whole, tmp_path):
    copy = shutil.copytree(whole / "r" / "checkpoints" / "step_000004", tmp_path / "step_000004")
    manifest = json.loads((copy / NAME).read_text())
    sizes = {name: found["bytes"] for name, found in manifest["files"].items()}
    (copy / NAME).write_text(json.dumps({"step": 4, "files": sizes}))

    assert read_checkpoint(copy).step == 4


def test_a_file_that_cannot_be_read_is_damage(whole, monkeypatch):
    def fails(path):
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr("rlcore.trainer.manifest._checksum", fails)

    found = damage(whole / "r" / "checkpoints" / "step_000004", checksums=True)
    assert found.endswith("actor/backend.json cannot be read: Input/output error")
    assert newest(whole / "r" / "checkpoints", checksums=True) is None


def test_the_link_to_the_best_checkpoint_does_not_dangle(tmp_path):
    (tmp_path / "step_000002").mkdir()
    (tmp_path / "best").symlink_to("step_000002")

    Checkpoints(tmp_path, 1).sweep(1)

    assert [path.name for path in tmp_path.iterdir()] == ["step_000002.damaged"]


@pytest.mark.parametrize(("number", "error"), [(errno.ENOSPC, RunError), (errno.EIO, InfrastructureError)])
def test_only_a_full_disk_is_not_tried_again(tmp_path, number, error):
    def fails(path):
        raise OSError(number, "the disk")

    with pytest.raises(error, match="checkpoint of step 3 could not be written") as raised:
        Checkpoints(tmp_path, 1).begin(3, {"step": 3}, fails)

    assert type(raised.value) is error


def test_damaged_checkpoints_of_several_resumes_keep_their_names_apart(tmp_path):
    for _ in range(3):
        (tmp_path / "step_000002").mkdir()
        Checkpoints(tmp_path, 1).sweep(1)

    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step_000002.damaged",
        "step_000002.damaged.1",
        "step_000002.damaged.2",
    ]
