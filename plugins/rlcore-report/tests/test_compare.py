"""`rlcore compare`: settings, results, and a difference that is more, or not more, than the noise."""

from __future__ import annotations

import io
import json
import shutil

import pytest
from conftest import rlcore, rows, write_rows
from rich.console import Console
from rlcore_report.compare import comparison
from rlcore_report.noise import difference, differing, variants
from rlcore_report.run import read_run


@pytest.fixture
def variant(copy, tmp_path):
    """Return a function that makes a run like the real one, with other settings and results."""

    def make(name, rate, **config):
        target = tmp_path / name
        shutil.copytree(copy, target)
        about = json.loads((target / "run.json").read_text()) | {"name": name}
        about["config"] |= {key.replace("__", "."): value for key, value in config.items()}
        (target / "run.json").write_text(json.dumps(about))
        lines = rows(target / "metrics.jsonl")
        lines[-1] |= {"eval/pass_rate": rate, "eval/samples": 100.0}
        write_rows(target / "metrics.jsonl", lines)
        return read_run(target)

    return make


def shown(*runs):
    console = Console(width=140, file=io.StringIO())
    console.print(comparison(runs))
    return console.file.getvalue()


def test_the_command_compares_two_directories(trained, copy):
    about = json.loads((copy / "run.json").read_text())
    about["config"]["optimizer.lr"] = 0.5
    (copy / "run.json").write_text(json.dumps(about))

    done = rlcore("compare", str(trained), str(copy))

    assert (done.returncode, done.stderr) == (0, "")
    for wanted in ("optimizer.lr", "0.001", "0.5", "eval/pass_rate", "noise"):
        assert wanted in done.stdout


def test_one_run_is_not_enough(trained):
    done = rlcore("compare", str(trained))

    assert done.returncode == 2
    assert done.stderr == f"error: one run cannot be compared\nType  rlcore compare {trained} OTHER\n"


def test_seeds_and_names_do_not_make_a_variant(variant):
    runs = [variant("a", 0.5, run__seed=0), variant("b", 0.6, run__seed=1), variant("c", 0.7, optimizer__lr=0.1)]

    assert [found.label for found in variants(runs)] == ["a + b", "c"]
    assert differing(runs)["optimizer.lr"] == ["0.001", "0.001", "0.1"]
    assert "same settings, apart from the seed" in shown(*runs[:2])


@pytest.mark.parametrize(
    ("first", "second", "exceeds"),
    [((0.50, 0.52, 0.51), (0.70, 0.72, 0.71), True), ((0.40, 0.60, 0.50), (0.45, 0.70, 0.62), False)],
)
def test_the_noise_between_seeds_decides(variant, first, second, exceeds):
    runs = [variant(f"a{i}", rate, run__seed=i) for i, rate in enumerate(first)]
    runs += [variant(f"b{i}", rate, run__seed=i, optimizer__lr=0.1) for i, rate in enumerate(second)]

    found = difference(*variants(runs), "eval/pass_rate")

    assert (abs(found.second - found.first) > found.noise) == exceeds
    assert found.source == "between 3 and 3 seeds"
    assert f"{'exceeds' if exceeds else 'is within'} the noise" in shown(*runs)


def test_welch_test_by_hand(variant):
    runs = [variant(f"a{i}", rate, run__seed=i) for i, rate in enumerate((0.5, 0.6))]
    runs += [variant(f"b{i}", rate, run__seed=i, optimizer__lr=0.1) for i, rate in enumerate((0.7, 0.8))]

    found = difference(*variants(runs), "eval/pass_rate")

    # variances 0.005, 0.005; standard error sqrt(0.005 / 2 + 0.005 / 2) = 0.0707; 2 degrees of freedom: t = 4.30
    assert found.noise == pytest.approx(4.30 * 0.005**0.5)
    assert found.second - found.first == pytest.approx(0.2)


def test_one_seed_each_has_the_sampling_error_of_the_evaluation(variant):
    runs = variants([variant("a", 0.5), variant("b", 0.7, optimizer__lr=0.1)])

    rate, reward = difference(*runs, "eval/pass_rate"), difference(*runs, "reward/mean")

    assert rate.noise == pytest.approx(2 * (0.5 * 0.5 / 100 + 0.7 * 0.3 / 100) ** 0.5)
    assert "other seeds may differ more" in rate.finding
    assert reward.finding == "noise unknown: give more seeds of each, such as  run.seed=1"


def test_a_metric_that_one_run_lacks_is_not_compared(variant):
    assert difference(*variants([variant("a", 0.5), variant("b", 0.7, optimizer__lr=0.1)]), "eval/pass_at_k") is None


def test_held_out_prompts_that_changed_are_listed(variant):
    runs = [variant("a", 0.5), variant("b", 0.7, optimizer__lr=0.1)]
    for run, rewards in zip(runs, [(1, 0, 0), (0, 1, 0)]):
        samples = [
            {"step": step, "prompt": f"prompt {i}", "completion": "", "reward": 1.0 if step == 4 else reward, "kind": "evaluation"}
            for step in (4, 8)
            for i, reward in enumerate(rewards)
        ]  # fmt: skip
        write_rows(run.directory / "samples.jsonl", samples)

    text = shown(*(read_run(run.directory) for run in runs))

    assert "held-out prompts that only b passes: 1\n  'prompt 1'" in text
    assert "held-out prompts that only a passes: 1\n  'prompt 0'" in text
