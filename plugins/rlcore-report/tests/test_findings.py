"""Warnings in plain words: each appears in a run with its fault, and not in one without."""

from __future__ import annotations

import json

import pytest
from rlcore_report.findings import findings
from rlcore_report.run import read_run

GOOD = {
    "reward__mean": lambda step: 0.2 + 0.005 * step,
    "reward__std": lambda step: 0.4,
    "actor__entropy": lambda step: 1.5 - 0.005 * step,
    "actor__clip_fraction": lambda step: 0.1,
    "actor__kl_to_old": lambda step: 0.01,
    "response_length__truncated": lambda step: 0.02,
    "experience__zero_variance_rows": lambda step: 8,
    "eval__pass_rate": lambda step: 0.1 + 0.005 * step,
}


def titles(run):
    return [finding.title for finding in findings(read_run(run))]


def test_a_good_run_has_no_warning(longer):
    assert titles(longer(100, **GOOD)) == []


@pytest.mark.parametrize(
    ("changes", "title"),
    [
        ({"actor__entropy": lambda n: 2 / n, "reward__mean": lambda n: 0.3 - 0.001 * n}, "Entropy has collapsed"),
        ({"actor__kl_to_reference": lambda n: 1e-6 * n**3}, "KL to the reference keeps growing"),
        ({"experience__zero_variance_rows": lambda n: 30}, "All rewards of a group are equal"),
        (
            {
                "experience__zero_variance_rows": lambda n: 30,
                "reward__mean": lambda n: min(1.0, 0.1 * n),
                "reward__std": lambda n: 0.4 / n,
            },
            "Rewards are saturated",
        ),
        ({"reward__mean": lambda n: 0.3}, "The reward does not rise"),
        ({"eval__pass_rate": lambda n: 0.9 - 0.005 * n}, "Held-out results fall"),
        ({"time_s__rollout.generate": lambda n: 9.0, "perf__step_s": lambda n: 10.0}, "The trainer waits for samples"),
        ({"time_s__wait for samples": lambda n: 9.0, "perf__step_s": lambda n: 10.0}, "The trainer waits for samples"),
        ({"response_length__truncated": lambda n: 0.5}, "response_length/truncated is above 0.25"),
        ({"actor__rollout_logprob_gap": lambda n: 0.2}, "actor/rollout_logprob_gap is above 0.05"),
        ({"reward__num_error": lambda n: 1.0}, "reward/num_error is above 0"),
        ({"actor__skipped": lambda n: 1.0}, "actor/skipped is above 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_fault_is_named(longer, changes, title):
    assert title in titles(longer(100, **(GOOD | changes)))


def test_a_single_odd_step_is_not_a_warning(longer):
    odd = {"actor__clip_fraction": lambda step: 0.9 if step == 99 else 0.1}

    assert titles(longer(100, **(GOOD | odd))) == []


def test_generation_that_overlaps_with_training_is_not_a_wait(longer):
    times = {"time_s__rollout.generate": 9.0, "time_s__wait for samples": 0.1, "perf__step_s": 10.0}

    assert titles(longer(100, **GOOD, **{name: lambda n, value=value: value for name, value in times.items()})) == []


def test_low_entropy_of_a_solved_task_is_not_a_collapse(longer):
    solved = {"actor__entropy": lambda step: 2 / step, "reward__mean": lambda step: min(1.0, step / 50)}

    assert titles(longer(100, **(GOOD | solved))) == []


def test_the_end_of_a_run_comes_first_and_says_how_to_go_on(longer):
    run = longer(100, **(GOOD | {"response_length__truncated": lambda step: 0.5}))
    about = json.loads((run / "run.json").read_text())
    about["summary"] |= {"error": "NumericalError: no", "steps": 99}
    (run / "run.json").write_text(json.dumps(about))

    first, second = findings(read_run(run))

    assert (first.level, first.title, first.text) == ("bad", "The run crashed", "NumericalError: no")
    assert second.metric == "response_length/truncated"


def test_a_killed_run_names_the_command_that_continues_it(copy):
    about = json.loads((copy / "run.json").read_text())
    del about["summary"]
    (copy / "run.json").write_text(json.dumps(about))

    (killed, *_) = findings(read_run(copy))

    assert killed.title == "The run was killed"
    assert f"Continue with:  rlcore train {copy}" in killed.text
