"""Recordings: what they hold, that they stay small, and that they never stop a run."""

from __future__ import annotations

import gzip
import json
import re
import shutil

import numpy as np
import pytest
from conftest import STEPS, rlcore, rows, write_rows
from rlcore_report.bounded import BoundedFile
from rlcore_report.evaluations import last_evaluation
from rlcore_report.recorder import EVAL_PROMPTS, GROUP_SIZE, MOST_BYTES, add_columns, chosen_groups, sample
from rlcore_report.run import read_run
from rlcore_report.timeline import RecordedCall, calls, lanes, waits
from rlcore_tests.runs import metrics, small_run

from rlcore.data.batch import Batch


def test_the_hooks_meet_their_contract():
    pytest.importorskip("rlcore_workbench", reason="needs plugins/rlcore-workbench")

    done = rlcore("check", "hooks", "rlcore_report.recorder:Recorder")

    assert done.returncode == 0, done.stdout


def test_training_is_the_same_with_a_recording(trained, recorded):
    plain, watched = ([dict(line) for line in metrics(directory.parent)] for directory in (trained, recorded))

    assert watched == plain


@pytest.mark.parametrize("installed", [True, False])
def test_the_quickstart_is_recorded_if_this_package_is_installed(trained, tmp_path, installed):
    settings = [it for it in small_run(tmp_path, "eval.every_steps=4", steps=STEPS) if "hooks" not in it]
    settings.remove("trackers=jsonl")

    done = rlcore("train", *settings, RLCORE_DISABLE_PLUGINS="" if installed else "rlcore-report")

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "r" / "report" / "samples.jsonl").exists() == installed
    assert [dict(line) for line in metrics(tmp_path)] == [dict(line) for line in metrics(trained.parent)]
    panel = re.sub(r"[│\s]", "", done.stdout.rpartition("╰")[0])
    assert panel.endswith(f"rlcorereport{tmp_path}/r"), "the last line says how to see the run"
    assert ("pipinstallrlcore-report" in panel) != installed


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


def test_tokens_have_the_columns_of_the_algorithm(recorded):
    by_sample = {(it["step"], it["sample_id"]): it for it in read_run(recorded).samples if it.get("tokens")}
    trained = [it for it in by_sample.values() if "advantage" in it["tokens"]]
    groups = {(it["step"], it["prompt_id"]) for it in trained}

    assert len(trained) > STEPS
    for step, prompt in groups:
        group = [it for it in trained if (it["step"], it["prompt_id"]) == (step, prompt)]
        assert sum(it["tokens"]["advantage"] for it in group) == pytest.approx(0, abs=0.01)
        assert (
            np.argsort([it["tokens"]["advantage"] for it in group]) == np.argsort([it["reward"] for it in group])
        ).all()
    for it in trained:
        assert it["tokens"]["version"] == it["step"] - 1
        assert len(it["tokens"]["gap"]) == len(it["tokens"]["text"])
        assert max(map(abs, it["tokens"]["gap"])) < 1e-3, "the engine and the trainer compute the same log-probs"
    left_out = [it for it in by_sample.values() if "advantage" not in it["tokens"]]
    assert left_out, "groups with equal rewards are not trained"
    assert all("entropy" not in it["tokens"] for it in by_sample.values()), "GRPO does not keep it"


def test_columns_per_token_follow_their_tokens():
    """Values of [prompt, a, b] and [prompt, prompt, c]; the third sample was changed by the algorithm."""
    lines = [
        {"sample_id": i, "tokens": {"text": text, "mask": []}} for i, text in ((7, ["a", "b"]), (8, ["c"]), (9, ["d"]))
    ]
    mask = [False, True, True, False, False, True, True, True]
    experience = Batch.of(
        lengths=[3, 3, 2],
        tokens={
            "loss_mask": mask,
            "advantages": [9.0, 0.5, 0.25, 9.0, 9.0, -1.0, 0.0, 0.0],
            "entropy": [9.0, 1.0, 2.0, 9.0, 9.0, 3.0, 0.0, 0.0],
            "old_log_probs": [0.0, -1.0, -2.0, 0.0, 0.0, -3.0, 0.0, 0.0],
            "rollout_log_probs": [0.0, -1.5, -2.0, 0.0, 0.0, -2.0, 0.0, 0.0],
        },
        rows={"sample_id": [7, 8, 9], "advantage": [0.0, 0.0, 0.0]},
    )

    add_columns(lines, experience.take([2, 1, 0]))

    assert [{name: it["tokens"].get(name) for name in ("advantage", "entropy", "gap")} for it in lines] == [
        {"advantage": [0.5, 0.25], "entropy": [1.0, 2.0], "gap": [0.5, 0.0]},
        {"advantage": [-1.0], "entropy": [3.0], "gap": [-1.0]},
        {"advantage": None, "entropy": None, "gap": None},
    ]


def test_the_timeline_has_steps_evaluations_and_checkpoints(recorded):
    found = calls(read_run(recorded).timeline)
    names = {(call.kind, call.name) for call in found}
    on_host = [call for call in found if call.host != "controller"]

    assert {("step", "rollout.generate"), ("step", "actor.update"), ("step", "weight sync")} <= names
    assert {("evaluation", "rollout.generate"), ("checkpoint", "actor.save")} <= names
    assert {call.host for call in found} == {"controller", "main rank 0"}
    assert {call.step for call in found if call.kind == "evaluation"} == {0, 4, 8, 12}
    assert lanes(on_host) == [0] * len(on_host), "runtime=local runs one call at a time"


def test_lines_of_another_timeline_are_noted(recorded, tmp_path):
    shutil.copytree(recorded, tmp_path / "r", ignore=shutil.ignore_patterns("checkpoints"))
    file = tmp_path / "r" / "report" / "timeline.jsonl"
    write_rows(file, [{"step": 0, "calls": [["actor.update", 1.0, 2.0]]}, {"step": 0}, *rows(file)])

    run = read_run(tmp_path / "r")

    assert "timeline.jsonl: left out 2 lines without calls of ranks" in run.notes
    assert calls(run.timeline) == calls(read_run(recorded).timeline)


def call(host, name, begin, end):
    return RecordedCall(1, "step", name, host, begin, end - begin)


def test_waiting_is_attributed_to_what_runs_elsewhere():
    found = [
        call("controller", "rollout.generate", 0.0, 4.0),
        call("engine rank 0", "rollout.generate", 0.0, 4.0),
        call("gpu rank 0", "actor.update", 1.0, 3.0),
        call("gpu rank 1", "actor.update", 1.0, 2.0),
        call("gpu rank 0", "weight sync", 5.0, 6.0),
    ]

    assert waits(found) == {
        "engine rank 0": {"no call": 1.0, "weight sync": 1.0},
        "gpu rank 0": {"rollout.generate": 2.0, "no call": 1.0},
        "gpu rank 1": {
            "rollout.generate": 2.0,
            "actor.update + rollout.generate": 1.0,
            "no call": 1.0,
            "weight sync": 1.0,
        },
    }


def test_calls_of_one_host_that_overlap_have_their_own_lanes():
    found = [
        call("a", "x", 0, 3),
        call("a", "y", 1, 2),
        call("b", "x", 1, 4),
        call("a", "z", 2, 5),
        call("a", "x", 3, 4),
    ]

    assert lanes(found) == [0, 1, 0, 1, 0]


def test_a_trace_is_written_for_perfetto(recorded, tmp_path):
    done = rlcore("report", str(recorded), "-o", f"{tmp_path}/p.html", "--trace", f"{tmp_path}/t.json.gz")
    events = json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes()))["traceEvents"]

    assert done.returncode == 0
    assert {it["args"]["name"] for it in events if it["ph"] == "M"} == {"controller", "main rank 0"}
    assert {"waits for rollout.generate", "rollout.generate"} <= {it["name"] for it in events if it["ph"] == "X"}
    assert all(it["dur"] >= 0 and it["ts"] > 0 for it in events if it["ph"] == "X")


def test_a_run_without_a_timeline_has_no_trace(trained, tmp_path):
    done = rlcore("report", str(trained), "--trace", f"{tmp_path}/t.json.gz")

    assert done.returncode == 2
    assert done.stderr == (
        f"error: {trained} has no timeline\nTrain with  plugins.hooks=[report]  or leave out  --trace\n"
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
    file = BoundedFile(path, 10_000, 99, append=False, warn=pytest.fail)

    written = [file.write(step, [{"step": step, "text": "x" * 50}] * 100) for step in range(100)]
    file.close()

    assert path.stat().st_size <= 10_000
    assert path.stat().st_size > 9_000
    assert max(written) <= 2
    assert sum(written[50:]) > sum(written) * 0.4


def test_a_resume_counts_what_is_there(tmp_path):
    path = tmp_path / "samples.jsonl"
    for append in (False, True):
        file = BoundedFile(path, 1000, 1, append=append, warn=pytest.fail)
        file.write(1, [{"step": 1, "text": "x" * 100}] * 100)
        file.close()

    assert path.stat().st_size <= 1000


@pytest.mark.parametrize("fault", ["no-directory", "full-disk"])
def test_a_run_goes_on_without_room_for_its_recording(trained, tmp_path, fault):
    """Every file of the recording fails; there is one warning, and the metrics are those of a run without recording."""
    folder = tmp_path / "r" / "report"
    folder.parent.mkdir()
    if fault == "no-directory":
        folder.write_text("not a directory")
    else:
        folder.mkdir()
        for name in MOST_BYTES:
            (folder / f"{name}.jsonl").symlink_to("/dev/full")

    done = rlcore("train", *small_run(tmp_path, "eval.every_steps=4", "plugins.hooks=[report]", steps=STEPS))

    assert done.returncode == 0
    assert done.stderr.count("the run continues, but its recording is incomplete") == 1
    assert ("No space left on device" in done.stderr) == (fault == "full-disk")
    assert metrics(tmp_path) == metrics(trained.parent)
