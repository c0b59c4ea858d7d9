"""The table of metrics explains every metric that a run logs."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from rlcore_report.run import read_run
from rlcore_report.table import explanation, explanations, in_order

ROOT = Path(__file__).parents[3]
SOURCES = [*ROOT.glob("rlcore/**/*.py"), *ROOT.glob("plugins/rlcore-*/src/**/*.py")]


def unexplained(names):
    return sorted(name for name in names if explanation(name) is None)


def test_every_metric_of_a_real_run_is_explained(trained):
    columns = read_run(trained).metrics.columns

    assert len(columns) > 30
    assert unexplained(columns) == []


def test_a_metric_that_is_missing_from_the_table_is_reported():
    assert unexplained(["actor/loss", "planner/depth"]) == ["planner/depth"]


def test_every_metric_that_the_code_names_is_explained():
    noted = re.compile(r'note\(f?"([a-z_]+/[^"]+)"|(?:metrics\[|")(eval/\w+|perf/\w+|controller/\w+|progress/\w+)"')
    names = {one or two for path in SOURCES for one, two in noted.findall(path.read_text())}

    assert len(names) > 25
    assert unexplained(names) == []


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("reward/mean", "reward/mean"),
        ("reward/gsm8k", "reward/{name}"),
        ("critic/grad_norm", "{role}/grad_norm"),
        ("actor/correction/k3", "actor/correction/{name}"),
        ("time_s/evaluate", "time_s/evaluate"),
        ("time_s/rollout.generate", "time_s/{call}"),
    ],
)
def test_the_most_exact_name_explains(name, row):
    assert explanation(name).name == row


def test_rows_are_complete():
    for row in explanations():
        bounded = row.low is not None or row.high is not None
        assert row.meaning.endswith(".") and row.healthy.endswith("."), row.name
        assert bool(row.advice) == bounded, row.name


def test_metrics_are_sorted_as_in_the_table():
    assert in_order(["x", "perf/step_s", "reward/b", "reward/a", "reward/mean"]) == [
        "reward/mean", "reward/a", "reward/b", "perf/step_s", "x",
    ]  # fmt: skip


def test_the_page_of_metrics_matches_the_table():
    make = runpy.run_path(str(ROOT / "docs" / "make_metrics.py"))

    assert make["TARGET"].read_text() == make["page"](), "type  python docs/make_metrics.py"


def test_the_settings_that_it_names_exist(trained):
    sections = "trainer|optimizer|eval|sampling|reward|episode|model"
    text = " ".join(f"{row.meaning} {row.healthy} {row.advice}" for row in explanations())
    named = set(re.findall(rf"(?<![\w/])(?:{sections})\.\w+", text))

    assert len(named) > 8
    assert named - read_run(trained).config.keys() == set()
