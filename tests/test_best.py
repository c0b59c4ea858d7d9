"""The best checkpoint by a metric, and the end of a run that does not improve."""

import json

import pytest
from rlcore_tests.runs import small_run

from rlcore.cli import main
from rlcore.trainer.run import Counters

HOOK = """
from rlcore import hookimpl
VALUES = {values}
class Mine:
    @hookimpl
    def rlcore_collect_metrics(self, run, step):
        return {{"mine": VALUES[step - 1]}} if VALUES[step - 1] is not None else {{}}
"""


def train(folder, values, *more, steps=None, keep="mine"):
    """Train with made-up values of the metric `mine`, one per step; return the exit code."""
    (folder / "mine.py").write_text(HOOK.format(values=values).replace("nan", "float('nan')"))
    settings = [f"plugins.hooks=['{folder}/mine.py:Mine']", f"checkpoint.keep_best={keep}", "checkpoint.keep_last=1"]
    quick = [
        "trainer.prompts_per_step=2",
        "sampling.samples_per_prompt=2",
        "data.eval=",
        "sampling.max_response_tokens=2",
    ]
    return main(["train", *small_run(folder, *quick, *settings, *more, steps=steps or len(values))])


def kept(folder):
    """Return the steps of all checkpoints, and that of the best."""
    directory = folder / "r" / "checkpoints"
    steps = sorted(int(path.name.removeprefix("step_")) for path in directory.glob("step_*"))
    return steps, int((directory / "best").resolve().name.removeprefix("step_"))


@pytest.mark.parametrize(
    ("values", "keep", "expected"),
    [
        ([0.1, 0.5, 0.5, 0.2], "mine", ([2, 4], 2)),
        ([0.1, 0.5, 0.7, 0.2], "-mine", ([1, 4], 1)),
        ([float("nan"), 0.1, None, 0.0], "mine", ([2, 4], 2)),
        ([0.1, 0.2, 0.3], "mine", ([3], 3)),
    ],
    ids=["first of equals", "lower is better", "nan and missing", "last"],
)
def test_the_best_checkpoint_is_kept_beside_the_last(tmp_path, values, keep, expected):
    assert train(tmp_path, values, keep=keep) == 0

    assert kept(tmp_path) == expected


def test_a_resumed_run_remembers_the_best(tmp_path):
    values = [0.1, 0.9, 0.3, 0.5, 0.4]
    assert train(tmp_path, values, steps=3) == 0
    assert train(tmp_path, values) == 0

    assert kept(tmp_path) == ([2, 5], 2)
    state = json.loads((tmp_path / "r" / "checkpoints" / "best" / "trainer.json").read_text())
    assert (state["counters"]["best"], state["counters"]["best_step"]) == (0.9, 2)


def test_the_best_value_of_another_metric_does_not_count(tmp_path, caplog):
    values = [0.1, 0.9, 0.3, 0.2, 0.5]
    assert train(tmp_path, values, "trainer.patience=1", steps=4) == 0
    assert "the run ends, as mine has not improved" in caplog.text
    assert train(tmp_path, values, "trainer.patience=1", keep="-mine") == 0

    assert kept(tmp_path) == ([4, 5], 4)


def test_a_run_with_a_best_checkpoint_is_evaluated_and_generates(tmp_path, capsys, caplog):
    best = ["checkpoint.keep_best=eval/reward", "trainer.patience=3", "schedule=pipelined", "placement=split"]
    assert main(["train", *small_run(tmp_path, *best, "eval.every_steps=1", steps=1)]) == 0
    caplog.clear()

    assert main(["eval", str(tmp_path / "r"), "eval.max_prompts=4"]) == 0
    assert main(["rollout", str(tmp_path / "r"), str(tmp_path / "samples"), "trainer.steps=1"]) == 0
    assert "does not correct" not in caplog.text


@pytest.mark.parametrize(("patience", "last"), [(0, 6), (2, 4), (3, 6)])
def test_a_run_without_improvement_ends(tmp_path, caplog, patience, last):
    assert train(tmp_path, [0.1, 0.5, 0.3, 0.4, 0.6, 0.6], f"trainer.patience={patience}") == 0

    lines = (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["step"] == last
    message = (
        "step 4: the run ends, as mine has not improved in the last 2 evaluations (trainer.patience); best at step 2"
    )
    assert (message in caplog.text) == (last == 4)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            ["checkpoint.keep_best=eval/reward"],
            "checkpoint.keep_best=eval/reward: this run evaluates nothing\nType  data.eval=",
        ),
        (
            ["checkpoint.keep_best=", "trainer.patience=2"],
            "trainer.patience=2 needs a metric\nType  checkpoint.keep_best=",
        ),
        (
            ["checkpoint.keep_best=eval/reward", "schedule.replay=samples"],
            "checkpoint.keep_best=eval/reward: with schedule.replay, a run evaluates nothing\nType  checkpoint.keep_best=",
        ),
        (["checkpoint.keep_best=mime"], "checkpoint.keep_best=mime: no such metric. Did you mean 'mine'?\nMetrics: "),
    ],
)
def test_a_metric_that_does_not_exist_is_refused(tmp_path, capsys, settings, words):
    assert train(tmp_path, [0.1, 0.2], *settings) == 2

    assert words in capsys.readouterr().err


def test_a_metric_that_only_the_last_step_has_is_told(tmp_path, caplog):
    settings = ["checkpoint.keep_best=eval/reward", "eval.every_steps=0"]
    assert main(["train", *small_run(tmp_path, *settings), "--dry-run"]) == 0

    assert "with eval.every_steps=0 only the last step has a value; type  eval.every_steps=10" in caplog.text


def test_counters_of_an_earlier_version_can_be_read():
    assert Counters(step=3).best is None
