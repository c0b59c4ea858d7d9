"""Recordings: what they hold, that they stay small, and that they never stop a run."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from conftest import STEPS, rlcore, rows, write_rows
from rlcore_report.bounded import BoundedFile
from rlcore_report.evaluations import last_evaluation
from rlcore_report.recorder import EVAL_PROMPTS, GROUP_SIZE, chosen_groups, sample
from rlcore_report.run import read_run
from rlcore_report.timeline import TimelineConfig, TimelineTracker, calls

from rlcore.testing import TrackerContract
from rlcore.testing.runs import metrics, small_run


class TestTimelineContract(TrackerContract):
    def make(self, run):
        return TimelineTracker(TimelineConfig(), run)


def test_the_hooks_meet_their_contract():
    pytest.importorskip("rlcore_workbench", reason="needs plugins/rlcore-workbench")

    done = rlcore("check", "hooks", "rlcore_report.recorder:Recorder")

    assert done.returncode == 0, done.stdout


def test_training_is_the_same_with_a_recording(trained, recorded):
    plain, watched = ([dict(line) for line in metrics(directory.parent)] for directory in (trained, recorded))

    assert watched == plain


def test_whole_groups_are_recorded_with_their_tokens(recorded):
    training = [it for it in rows(recorded / "report" / "samples.jsonl") if it["kind"] == "training"]
    groups = {(it["step"], it["prompt"]): 0 for it in training}
    for it in training:
        groups[it["step"], it["prompt"]] += 1

    assert {it["step"] for it in training} == {*range(1, STEPS + 1)}
    assert set(groups.values()) == {4}, "samples_per_prompt"
    for it in training:
        tokens = it["tokens"]
        assert re.sub(r"<\w+>", "", "".join(tokens["text"])) == it["completion"]  # without special tokens
        assert len(tokens["text"]) == len(tokens["log_prob"]) == sum(tokens["mask"])
        assert max(tokens["log_prob"]) <= 0


def test_the_same_held_out_prompts_are_recorded_each_time(recorded):
    found = [it for it in rows(recorded / "report" / "samples.jsonl") if it["kind"] == "evaluation"]
    by_step = {step: [it["prompt"] for it in found if it["step"] == step] for step in (0, 4, 8, 12)}

    assert len(found) == 4 * 16 <= 4 * EVAL_PROMPTS
    assert len({tuple(prompts) for prompts in by_step.values()}) == 1
    assert len(last_evaluation(read_run(recorded))) == 16


def test_distributions_count_all_samples(recorded):
    lines = rows(recorded / "report" / "distributions.jsonl")
    means = dict(read_run(recorded).metrics.known("reward/mean"))

    assert [sum(line["reward"]["counts"]) for line in lines] == [32] * STEPS
    assert all(line["reward"]["mean"] == pytest.approx(means[line["step"]], abs=1e-4) for line in lines)
    assert all(line["lag"]["mean"] == 0 for line in lines)


def test_logged_and_recorded_samples_are_joined(recorded):
    run = read_run(recorded)
    training = [(it["step"], it["sample_id"]) for it in run.samples if it.get("kind") != "evaluation"]

    assert len(training) == len(set(training))
    assert len(training) > 4 * STEPS
    assert [it["step"] for it in run.samples] == sorted(it["step"] for it in run.samples)


def test_the_timeline_has_the_calls_of_each_step(recorded):
    found = [call for call in calls(read_run(recorded).timeline) if call["step"] == 5]

    assert {"rollout.generate", "reward.score", "actor.update"} <= {call["name"] for call in found}
    assert all(a["begin"] + a["seconds"] <= b["begin"] + 1e-3 for a, b in pairwise(found))


def test_a_trace_is_written_for_perfetto(recorded, tmp_path):
    done = rlcore("report", str(recorded), "-o", f"{tmp_path}/p.html", "--trace", f"{tmp_path}/t.json.gz")
    events = json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes()))["traceEvents"]

    assert done.returncode == 0
    assert {"rollout", "actor", "controller"} <= {it["args"]["name"] for it in events if it["ph"] == "M"}
    assert all(it["dur"] >= 0 and it["ts"] > 0 for it in events if it["ph"] == "X")


def test_a_run_without_a_timeline_has_no_trace(trained, tmp_path):
    done = rlcore("report", str(trained), "--trace", f"{tmp_path}/t.json.gz")

    assert done.returncode == 2
    assert done.stderr == (
        f"error: {trained} has no timeline\nTrain with  trackers=[console,jsonl,report]  or leave out  --trace\n"
    )


def test_a_resumed_run_replaces_the_steps_that_it_repeats(recorded, tmp_path):
    shutil.copytree(recorded, tmp_path / "r", ignore=shutil.ignore_patterns("checkpoints"))
    file = tmp_path / "r" / "report" / "distributions.jsonl"
    lines = rows(file)
    write_rows(file, [*lines, lines[7] | {"again": 1}, lines[8] | {"again": 1}])

    found = read_run(tmp_path / "r").distributions

    assert [line["step"] for line in found] == [*range(1, 10)]
    assert ["again" in line for line in found] == [False] * 7 + [True] * 2


@pytest.mark.parametrize(
    ("rewards", "group_ids", "step", "wanted"),
    [
        ([0, 1, 0, 0, 1, 1, 0, 0], [1, 1, 2, 2, 3, 3, 4, 4], 3, [[0, 1], [4, 5], [2, 3], [6, 7]]),
        ([0, 1, 0, 1], [1, 2, 1, 2], 0, [[0, 2], [1, 3]]),
        ([np.nan, np.nan, 1, 1], [1, 1, 2, 2], 0, [[2, 3]]),
        ([np.nan], [1], 0, []),
    ],
    ids=["divided-best-worst-other", "rows-of-a-group-apart", "without-a-reward", "nothing"],
)
def test_groups_are_chosen_by_reward(rewards, group_ids, step, wanted):
    assert chosen_groups(np.array(rewards, dtype=float), np.array(group_ids), step) == wanted


def test_of_a_large_group_the_best_and_the_worst_are_recorded():
    (rows,) = chosen_groups(np.arange(100.0), np.zeros(100, dtype=int), 0)

    assert rows == [*range(GROUP_SIZE // 2), *range(100 - GROUP_SIZE // 2, 100)]


def test_the_text_of_a_judge_is_kept():
    row = {"prompt": "p", "completion": "c", "reward": 0.5, "reward_status": 0, "reward_note": ("judge", "Vague.", {})}

    assert sample(1, "training", row, None)["columns"] == {"reward_note": ["judge", "Vague.", {}]}


def test_a_file_stays_within_its_bytes_and_leaves_room_for_later_steps(tmp_path):
    path = tmp_path / "report" / "samples.jsonl"
    file = BoundedFile(path, 10_000, 99, append=False)

    written = [file.write(step, [{"step": step, "text": "x" * 50}] * 100) for step in range(100)]
    file.close()

    assert path.stat().st_size <= 10_000
    assert path.stat().st_size > 9_000
    assert max(written) <= 2
    assert sum(written[50:]) > sum(written) * 0.4


def test_a_resume_counts_what_is_there(tmp_path):
    path = tmp_path / "samples.jsonl"
    for append in (False, True):
        file = BoundedFile(path, 1000, 1, append=append)
        file.write(1, [{"step": 1, "text": "x" * 100}] * 100)
        file.close()

    assert path.stat().st_size <= 1000


def test_a_full_disk_is_one_warning(caplog):
    file = BoundedFile(Path("/dev/full"), 10**9, 1, append=False)

    written = [file.write(1, [{"step": 1}]) for _ in range(3)]
    file.close()

    assert [record.message for record in caplog.records] == [
        "/dev/full: No space left on device; the run continues without this recording"
    ]
    assert written == [1, 0, 0] or written == [0, 0, 0]


def test_a_directory_that_cannot_be_made_is_one_warning(tmp_path, caplog):
    (tmp_path / "report").write_text("a file")

    file = BoundedFile(tmp_path / "report" / "samples.jsonl", 1000, 1, append=False)

    assert file.write(1, [{"step": 1}]) == 0
    assert len(caplog.records) == 1


def test_a_run_goes_on_without_room_for_its_recording(tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "report").write_text("not a directory")

    done = rlcore(
        "train", *small_run(tmp_path, "data.eval=", "trackers=[jsonl,report]", "plugins.hooks=[report]", steps=2)
    )

    assert done.returncode == 0
    assert done.stderr.count("the run continues without this recording") == 3
