"""Trackers write to real files and a real, captured console."""

import io
import json
import logging
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from rlcore_tests.runs import small_run

from rlcore.cli.train import run as train
from rlcore.errors import UserError
from rlcore.protocols.tracker import RunInfo, SampleRecord
from rlcore.testing.waiting import HANG_S
from rlcore.trackers import display
from rlcore.trackers.console import ConsoleConfig, ConsoleTracker
from rlcore.trackers.display import State, duration, line, shorten, sparkline, thousands
from rlcore.trackers.jsonl import JSONLConfig, JSONLTracker
from rlcore.trackers.tensorboard import TensorBoardConfig, TensorBoardTracker
from rlcore.trackers.wandb import WandbConfig, WandbTracker

SAMPLE = SampleRecord(step=3, prompt="2 + 2 =", completion="4, ∑\n", reward=1.0, parts={"exact": 1.0, "skip": math.nan})
METRICS = {
    "reward/mean": 0.25,
    "eval/pass_rate": 0.5,
    "actor/kl_to_reference": 0.0123,
    "actor/entropy": 1.5,
    "actor/grad_norm": 0.75,
    "reward/num_error": 0.0,
    "response_length/mean": 12.5,
    "perf/tokens_per_second": 15300.0,
    "perf/step_s": 2.0,
    "time_s/rollout.generate": 1.5,
    "time_s/actor.update": 0.25,
}


@pytest.fixture
def info(tmp_path):
    return RunInfo(name="run", directory=tmp_path, total_steps=10)


def jsonl(info, resume_step=None):
    tracker = JSONLTracker(JSONLConfig(), info)
    tracker.start({}, resume_step=resume_step)
    return tracker


def strict(path):
    """Read the lines of a file with a strict JSON parser, which refuses NaN and Infinity."""

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return [json.loads(text, parse_constant=refuse) for text in path.read_text(encoding="utf-8").splitlines()]


def test_jsonl_has_one_line_per_step_at_once(info):
    tracker = jsonl(info)

    for step in range(3):
        tracker.log(step, {"reward/mean": step / 2})
        assert [(row["step"], row["reward/mean"]) for row in strict(tracker.metrics_path)][-1] == (step, step / 2)

    assert len(strict(tracker.metrics_path)) == 3
    tracker.finish({})
    tracker.finish({})


def test_jsonl_names_metrics_that_are_not_finite(info):
    tracker = jsonl(info)

    tracker.log(1, {"b": math.nan, "a": math.inf, "fine": 1.0})
    tracker.finish({})

    (row,) = strict(tracker.metrics_path)
    assert (row["a"], row["b"], row["fine"], row["non_finite"]) == (None, None, 1.0, ["a", "b"])


def test_jsonl_keeps_samples_readable(info):
    tracker = jsonl(info)
    columns = {"answer": 4, "weight": math.nan, "nested": {"x": [math.inf, 2.0]}, "odd": {1}}

    tracker.log_samples(3, [SAMPLE, replace(SAMPLE, reward=None, columns=columns)])
    tracker.finish({})

    first, second = strict(tracker.samples_path)
    assert (first["prompt"], first["completion"], first["parts"]) == ("2 + 2 =", "4, ∑\n", {"exact": 1.0, "skip": None})
    assert second["reward"] is None
    assert second["columns"] == {"answer": 4, "weight": None, "nested": {"x": [None, 2.0]}, "odd": "{1}"}


def test_jsonl_escapes_half_of_a_surrogate_pair(info):
    tracker = jsonl(info)

    tracker.log(1, {"a\ud83d": 1.0})
    tracker.log_samples(1, [replace(SAMPLE, prompt="\udc00")])
    tracker.finish({})

    assert strict(tracker.metrics_path)[0]["a\ud83d"] == 1.0
    assert strict(tracker.samples_path)[0]["prompt"] == "\udc00"


def test_run_json_has_the_settings_at_once_and_the_summary_at_the_end(info):
    tracker = JSONLTracker(JSONLConfig(), info)
    path = info.directory / "run.json"

    tracker.start({"optimizer.lr": math.inf, "trainer.steps": 10, "data.eval": None}, resume_step=4)
    begun = json.loads(path.read_text())
    tracker.finish({"steps": 10, "checkpoint": info.directory})
    tracker.finish({"steps": 11})
    ended = json.loads(path.read_text())

    assert begun["config"] == {"optimizer.lr": None, "trainer.steps": 10, "data.eval": None}
    assert (begun["format"], begun["resumed_from"], begun["total_steps"]) == (1, 4, 10)
    assert "summary" not in begun
    assert ended["summary"] == {"steps": 10, "checkpoint": str(info.directory)}
    assert ended["ended"] >= ended["started"] == begun["started"]
    assert not path.with_suffix(".new").exists()


def test_a_new_run_of_the_same_name_moves_old_lines_aside(info):
    for value in (1.0, 2.0, 3.0):
        tracker = jsonl(info)
        tracker.log(1, {"x": value})
        tracker.finish({})

    names = ["metrics.1.jsonl", "metrics.2.jsonl", "metrics.jsonl"]
    assert [strict(info.directory / name)[0]["x"] for name in names] == [1.0, 2.0, 3.0]


def test_a_resume_removes_lines_after_its_checkpoint(info):
    tracker = jsonl(info)
    for step in range(6):
        tracker.log(step, {"x": 1.0})
        tracker.log_samples(step, [replace(SAMPLE, step=step)])
    tracker.finish({})

    tracker = jsonl(info, resume_step=3)
    tracker.log(4, {"x": 2.0})
    tracker.finish({})

    assert [(row["step"], row["x"]) for row in strict(tracker.metrics_path)] == [
        *((n, 1.0) for n in range(4)),
        (4, 2.0),
    ]
    assert [row["step"] for row in strict(tracker.samples_path)] == [0, 1, 2, 3]
    assert sorted(path.name for path in info.directory.iterdir()) == ["metrics.jsonl", "run.json", "samples.jsonl"]


def test_a_resume_drops_an_incomplete_line_and_logs_it(info, caplog):
    tracker = jsonl(info)
    for step in range(3):
        tracker.log(step, {"x": 1.0})
    tracker.finish({})
    lines = tracker.metrics_path.read_text().splitlines()
    tracker.metrics_path.write_text("\n".join([lines[0], lines[1][:9], lines[2], ""]))

    jsonl(info, resume_step=5).finish({})

    assert [row["step"] for row in strict(tracker.metrics_path)] == [0, 2]
    assert "dropped an incomplete line of 10 bytes" in caplog.text


def test_a_resume_survives_a_line_that_ends_inside_a_character(info):
    tracker = jsonl(info)
    tracker.log_samples(3, [SAMPLE, SAMPLE])
    tracker.finish({})
    whole = tracker.samples_path.read_bytes()
    tracker.samples_path.write_bytes(whole[: whole.rindex("∑".encode()) + 1])

    jsonl(info, resume_step=5).finish({})

    assert len(strict(tracker.samples_path)) == 1


def test_a_resume_without_earlier_files_begins_them(info):
    tracker = jsonl(info, resume_step=5)
    tracker.log(6, {})
    tracker.finish({})

    assert [row["step"] for row in strict(tracker.metrics_path)] == [6]


class Clock:
    """Replacement for time.monotonic that a test advances."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr("rlcore.trackers.console.time.monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def console(info, *, terminal, live=True, width=100):
    """Return a tracker and the console that it writes to."""
    out = io.StringIO()
    made = Console(
        file=out, force_terminal=terminal, width=width, height=40, color_system=None, highlight=False,
        _environ={"TERM": "xterm" if terminal else "dumb"},
    )  # fmt: skip
    return ConsoleTracker(ConsoleConfig(live=live), info, console=made), out


ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def last_frame(out):
    """Return the text of the last panel that was drawn."""
    return ESCAPES.sub("", out.getvalue()).rpartition("╭")[2]


def test_live_display_shows_the_run(info, clock):
    tracker, out = console(info, terminal=True)
    tracker.start({}, resume_step=None)
    for step in (1, 2, 3):
        clock.now += 2.0
        tracker.phase("actor.update")
        tracker.log_samples(step, [SAMPLE])
        tracker.log(step, METRICS | {"reward/mean": step / 4, "eval/pass_rate": step / 10})
    clock.now += 2.0
    tracker.phase("rollout.generate")

    frame = last_frame(out)

    assert "\x1b[?25l" in out.getvalue()  # a live display hides the cursor
    # 8 s for 3 steps, 7 to go: 18.7 s
    for words in (
        "step 3/10", "8s elapsed, 19s left", "rollout.generate", "reward 0.500 ▃▅▇", "eval 0.10 → 0.30",
        "15.3k tok/s", "kl 0.0123", "entropy 1.5", "grad norm 0.75", "length 12.5",
        "sample of step 3: reward 1.00", "2 + 2 = → 4, ∑⏎",
    ):  # fmt: skip
        assert words in frame, words
    assert "reward errors" not in frame
    bars = {text.split()[1]: (text.split()[2], text.count("█")) for text in frame.splitlines() if "█" in text}
    # 94 columns inside, 54 of them for the 2 s of the step: 1.5 s are 40.5, rounded to even, 0.25 s are 6.75
    assert bars == {"rollout.generate": ("1.500", 40), "actor.update": ("0.250", 7)}
    tracker.finish({})


def test_live_display_draws_at_most_four_times_a_second(info, clock):
    tracker, out = console(info, terminal=True)
    tracker.start({}, resume_step=None)
    for _ in range(100):
        clock.now += 0.01
        tracker.phase("x")

    assert out.getvalue().count("╭") in (4, 5)
    tracker.finish({})


def test_live_display_ends_with_a_summary_and_gives_the_terminal_back(info, clock):
    handlers = list(logging.getLogger().handlers)
    tracker, out = console(info, terminal=True)
    tracker.start({}, resume_step=None)
    tracker.log(1, METRICS)

    tracker.finish({"steps": 10, "total_steps": 10, "seconds": 61.0, "tokens": 12345})
    tracker.finish({})

    assert "\x1b[?25h" in out.getvalue()
    assert logging.getLogger().handlers == handlers
    assert last_frame(out).count("10 of 10 in 1m01s, 12,345 tokens") == 1
    assert out.getvalue().count("done") == 1


def test_log_messages_stay_above_the_live_display(info, clock):
    tracker, out = console(info, terminal=True)
    tracker.start({}, resume_step=None)

    logging.getLogger("rlcore.test").warning("mind [the] gap")

    assert "mind [the] gap" in out.getvalue()
    tracker.finish({})


@pytest.mark.parametrize("terminal", [False, True], ids=["line", "panel"])
def test_metrics_that_the_algorithm_names_are_shown(info, clock, terminal):
    tracker, out = console(replace(info, shows={"actor/loss": "loss", "actor/absent": "absent"}), terminal=terminal)
    tracker.start({}, resume_step=None)

    tracker.log(1, {"actor/loss": 0.69315, "response_length/mean": 6.0})
    tracker.finish({})

    assert "loss 0.693" in out.getvalue()
    assert "absent" not in out.getvalue()


def test_a_pipe_gets_plain_lines(info, clock):
    tracker, out = console(info, terminal=False)
    tracker.start({}, resume_step=None)
    tracker.log(0, {"eval/pass_rate": 0.5})
    clock.now += 4.0
    tracker.phase("x")
    tracker.log(2, METRICS)
    tracker.log_samples(2, [SAMPLE])

    assert "\x1b" not in out.getvalue()
    assert out.getvalue().splitlines() == [
        "step  0/10  eval 0.500",
        "step  2/10  reward 0.250  eval 0.500  kl 0.0123  length 12.5  15.3k tok/s  2.00 s  left 16s",
    ]


def test_live_false_prints_lines_on_a_terminal_too(info, clock):
    tracker, out = console(info, terminal=True, live=False)
    tracker.start({}, resume_step=None)
    tracker.log(1, {"reward/mean": 0.5})

    assert out.getvalue() == "step  1/10  reward 0.500  left ?\n"


def test_a_long_run_prints_about_two_hundred_lines(info, clock):
    tracker, out = console(replace(info, total_steps=1001), terminal=False)
    tracker.start({}, resume_step=None)
    for step in range(1, 1002):
        tracker.log(step, {"reward/mean": 0.0})

    lines = out.getvalue().splitlines()
    assert len(lines) == 201
    assert lines[-1].startswith("step 1001/1001")


def test_time_left_of_a_resumed_run_counts_only_its_own_steps(info, clock):
    tracker, out = console(info, terminal=False)
    tracker.start({}, resume_step=8)
    clock.now += 30.0  # the start
    clock.now += 3.0
    tracker.log(9, {"perf/step_s": 3.0})

    assert out.getvalue().endswith("left 3s\n")


def test_display_has_no_markup_of_its_users(info, clock):
    tracker, out = console(replace(info, name="[red]x[/]"), terminal=True)
    tracker.start({}, resume_step=None)
    tracker.log_samples(1, [replace(SAMPLE, prompt="[bold]a[/bold]", completion="\x1b[31m\x07")])
    clock.now += 1
    tracker.log(1, {"reward/mean": math.nan})

    frame = last_frame(out)

    assert "[red]x[/]" in frame
    assert "[bold]a[/bold] → ·[31m·" in frame
    tracker.finish({"error": "ValueError: [/x]"})
    assert "ValueError: [/x]" in out.getvalue()


@pytest.mark.parametrize("width", [20, 40, 200])
def test_display_fits_its_terminal(info, clock, width):
    tracker, out = console(info, terminal=True, width=width)
    tracker.start({}, resume_step=None)
    tracker.log_samples(1, [replace(SAMPLE, prompt="p" * 500)])
    clock.now += 1
    tracker.log(1, METRICS)

    assert max(len(text) for text in last_frame(out).splitlines()) <= min(100, width)
    tracker.finish({})


@pytest.mark.parametrize(
    ("values", "width", "expected"),
    [
        ([], 10, ""),
        ([math.nan], 10, ""),
        ([0.0], 10, "▁"),
        ([0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1], 9, "▁▂▃▄▅▆▇██"),
        ([0, 1, 0, 1], 2, "▅▅"),  # means of pairs
        ([0, 4, 8], 3, "▁▅█"),  # from 0 to the highest
        ([-1, 0, 1], 3, "▁▅█"),  # from the lowest to 1
        ([0.5, math.inf, 0.5], 10, "▅▅"),
    ],
)
def test_sparkline(values, width, expected):
    assert sparkline(values, width) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (None, "?"), (math.inf, "?"), (0, "0s"), (59.4, "59s"), (59.6, "1m00s"), (75.3, "1m15s"),
        (3599.6, "1h00m"), (3660, "1h01m"), (90000, "25h00m"),
    ],
)  # fmt: skip
def test_duration(seconds, expected):
    assert duration(seconds) == expected


@pytest.mark.parametrize(("value", "expected"), [(0, "0"), (999, "999"), (1000, "1.0k"), (15300, "15.3k")])
def test_thousands(value, expected):
    assert thousands(value) == expected


@pytest.mark.parametrize(
    ("text", "limit", "expected"),
    [("abc", 3, "abc"), ("a\nb\tc\x00", 9, "a⏎b c·"), ("0123456789", 9, "012 … 789")],
)
def test_shorten(text, limit, expected):
    assert shorten(text, limit) == expected


def test_line_of_the_last_step_has_no_time_left():
    assert line(State(name="x", total_steps=5, step=5, elapsed_s=3)) == "step 5/5"


def shown(facts):
    out = io.StringIO()
    Console(file=out, width=100, color_system=None).print(display.summary(facts))
    return out.getvalue()


@pytest.mark.parametrize(
    ("facts", "present", "absent"),
    [
        pytest.param(
            {"steps": 5, "total_steps": 5, "next_command": "rlcore eval x", "resume_command": "rlcore train y", "report_command": "rlcore report x"},
            ["done", "try next", "rlcore eval x", "see the run", "rlcore report x"], ["continue", "rlcore train y"], id="done",
        ),
        pytest.param(
            {"steps": 3, "total_steps": 5, "next_command": "rlcore eval x", "resume_command": "rlcore train y"},
            ["stopped early", "continue", "rlcore train y"], ["rlcore eval x"], id="stopped",
        ),
        pytest.param(
            {"steps": 5, "total_steps": 5, "error": "HostDied: " + "gone " * 30, "resume_command": "rlcore train y"},
            ["ended early", "HostDied: gone", "rlcore train y"], ["…"], id="failed",
        ),
        pytest.param(
            {"reward_first": 0.1, "reward_last": 0.75, "eval_first": 0.0, "eval_last": 0.5, "checkpoint": "out/c"},
            ["0.100 → 0.750", "0.000 → 0.500", "out/c"], [], id="numbers",
        ),
        pytest.param({}, ["? of ? in ?, 0 tokens"], ["→"], id="nothing-known"),
    ],
)  # fmt: skip
def test_summary(facts, present, absent):
    text = shown(facts)

    assert [words for words in present if words not in text] == []
    assert [words for words in absent if words in text] == []


def test_tensorboard_events_can_be_read(info):
    pytest.importorskip("tensorboard")
    tracker = TensorBoardTracker(TensorBoardConfig(), info)
    tracker.start({"run.seed": 7}, resume_step=None)
    for step in range(1, 4):
        tracker.log(step, {"reward/mean": step / 4})
    tracker.log_samples(3, [SAMPLE])
    tracker.log_distributions(3, {"reward": np.array([0.0, 1.0, 1.0]), "response_length": np.array([])})
    tracker.finish({})
    tracker.finish({})

    events = read_events(info)

    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert "run.seed: 7" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    table = events.Tensors("samples/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "| prompt | completion |" in table
    assert "| 2 + 2 = | 4, ∑⏎ | stop | 1.0 | 1.0 | None |" in table
    assert events.Histograms("distribution/reward")[0].histogram_value.num == 3


def test_a_run_shows_the_distribution_of_all_samples(tmp_path):
    pytest.importorskip("tensorboard")
    train(small_run(tmp_path, "trackers=tensorboard", "data.eval=", steps=2), dry_run=False)

    events = read_events(RunInfo(name="r", directory=tmp_path / "r", total_steps=2))

    for name in ("reward", "response_length"):
        last = events.Histograms(f"distribution/{name}")[-1]
        assert (last.step, last.histogram_value.num) == (2, 32)


def test_tensorboard_hides_steps_abandoned_by_a_resume(info):
    pytest.importorskip("tensorboard")
    for resume_step, steps, value in ((None, range(1, 6), 1.0), (3, range(4, 6), 2.0)):
        tracker = TensorBoardTracker(TensorBoardConfig(), info)
        tracker.start({}, resume_step=resume_step)
        for step in steps:
            tracker.log(step, {"x": value})
        tracker.finish({})

    seen = [(event.step, event.value) for event in read_events(info).Scalars("x")]

    assert seen == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0)]


def read_events(info):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(info.directory / "tensorboard")).Reload()


WANDB_RUN = """
import sys
from pathlib import Path
import numpy as np
from rlcore.protocols.tracker import RunInfo, SampleRecord
from rlcore.trackers.wandb import WandbConfig, WandbTracker

run = RunInfo(name="offline-run", directory=Path(sys.argv[1]), total_steps=2)
tracker = WandbTracker(WandbConfig(mode=sys.argv[2], entity="team", group="seeds", tags=("small",)), run)
tracker.start({"run.seed": 7}, resume_step=None)
tracker.log(1, {"reward/mean": 0.25})
tracker.log_samples(1, [SampleRecord(step=1, prompt="2 + 2 =", completion="4", reward=1.0, prompt_id=0, sample_id=0)])
tracker.log_distributions(1, {"reward": np.array([0.0, 1.0, 1.0]), "response_length": np.array([])})
tracker.finish({"steps": 1, "error": None})
"""


def wandb_process(directory, mode):
    pytest.importorskip("wandb")
    env = {**os.environ, "WANDB_SILENT": "true", "HOME": str(directory)}
    env.pop("WANDB_API_KEY", None)
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WANDB_RUN, str(directory), mode],
        env=env,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def test_wandb_offline_leaves_a_run_that_can_be_synced(tmp_path):
    done = wandb_process(tmp_path, "offline")

    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    for text in (b"reward/mean", b"distribution/reward", b"team", b"seeds", b"small"):
        assert text in file.read_bytes()
    assert list(tmp_path.glob("wandb/offline-run-*/files/media/table/samples_*.json"))


def test_wandb_continues_a_resumed_run_but_not_another_one_of_the_same_name(info, monkeypatch):
    seen = []
    run = SimpleNamespace(summary={}, finish=lambda: None)
    fake = SimpleNamespace(Error=OSError, init=lambda **options: seen.append(options["id"]) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)

    for resume_step in (None, 3, None, 0):
        WandbTracker(WandbConfig(), info).start({}, resume_step=resume_step)

    assert [one.startswith(f"{info.name}-") for one in seen] == [True] * 4
    assert seen[0] == seen[1] != seen[2] == seen[3]


def test_wandb_without_a_key_is_refused_with_the_command_to_type(tmp_path):
    done = wandb_process(tmp_path, "online")

    assert "UserError: tracker 'wandb': " in done.stderr
    assert "mode: offline" in done.stderr


@pytest.mark.parametrize(
    ("module", "tracker", "config"),
    [("wandb", WandbTracker, WandbConfig()), ("tensorboard", TensorBoardTracker, TensorBoardConfig())],
)
def test_a_missing_package_is_named_with_the_line_to_type(info, monkeypatch, module, tracker, config):
    monkeypatch.setitem(sys.modules, module, None)

    with pytest.raises(UserError) as raised:
        tracker(config, info)

    assert str(raised.value).splitlines() == [
        f"tracker '{module}' needs the Python package '{module}', which is not installed",
        f"Type  pip install 'rlcore[{module}]'",
    ]
