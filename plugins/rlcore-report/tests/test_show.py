"""`rlcore show`: one terminal screen."""

from __future__ import annotations

import io
import json

from conftest import rlcore, write_rows
from rich.console import Console
from rlcore_report.run import read_run
from rlcore_report.show import curve, main, screen


def text(run, width=100):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(screen(run))
    return console.export_text()


def test_the_command_prints_one_screen(trained):
    done = rlcore("show", str(trained))

    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) <= 40
    for wanted in ("r: finished", "12 of 12", "grpo", "reward/mean", "eval/pass_rate", "best", "rlcore report"):
        assert wanted in done.stdout


def test_every_metric_is_shown_on_request(trained, capsys):
    main([str(trained), "--all"])

    shown = capsys.readouterr().out
    assert "time_s/actor.update" in shown
    assert "controller/bytes" in shown


def test_a_run_without_steps_and_samples_is_shown(copy):
    for name in ("metrics.jsonl", "samples.jsonl"):
        (copy / name).write_text("")

    assert "0 of 12" in text(read_run(copy))


def test_a_wrong_directory_is_an_input_error(tmp_path):
    done = rlcore("show", str(tmp_path))

    assert done.returncode == 2
    assert done.stderr.startswith(f"error: '{tmp_path}' is not a run")


def test_samples_cannot_draw_on_the_terminal(copy):
    sample = json.loads((copy / "samples.jsonl").read_text().splitlines()[0])
    write_rows(copy / "samples.jsonl", [sample | {"reward": 1.0, "completion": "\x1b[2J[red]x[/]\n\u202e🧮" * 99}])

    shown = text(read_run(copy))

    assert "\x1b" not in shown
    assert "·[2J[red]x[/]⏎·🧮" in shown


def test_curves_are_drawn_between_lowest_and_highest():
    assert curve([0, 1, 2, 3]) == "▁▃▆█"
    assert curve([5, 5]) == "▁▁"
    assert len(curve(range(1000), width=30)) == 30
    assert curve([]) == ""
