"""`rlcore report`: one file, small enough, that loads nothing and holds text as data only."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re

import pytest
from conftest import STEPS, rlcore, rows, write_rows
from rlcore_report import payload as payload_module
from rlcore_report.page import MOST_BYTES, document, page
from rlcore_report.payload import payload
from rlcore_report.run import read_run


def data_of(html):
    (packed,) = re.findall(r'<script id="data"[^>]*>([^<]*)</script>', html)
    return json.loads(gzip.decompress(base64.b64decode(packed)))


@pytest.fixture(scope="module")
def made(trained):
    return page([read_run(trained)])


def test_the_command_writes_a_page_next_to_the_run(trained, tmp_path):
    done = rlcore("report", str(trained))

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{trained}/report.html: 0.1 MB")
    assert (trained / "report.html").read_text().startswith("<!doctype html>")


def test_several_runs_need_a_file(trained, copy, tmp_path):
    refused = rlcore("report", str(trained), str(copy))
    done = rlcore("report", str(trained), str(copy), "-o", f"{tmp_path}/both.html")

    assert (refused.returncode, done.returncode) == (2, 0)
    assert refused.stderr == "error: several runs need a file for their page\nType  -o FILE.html\n"
    assert [run["name"] for run in data_of((tmp_path / "both.html").read_text())["runs"]] == ["r (1)", "r (2)"]


def test_a_place_that_cannot_be_written_is_an_input_error(trained, tmp_path):
    done = rlcore("report", str(trained), "-o", f"{tmp_path}/no/page.html")

    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {tmp_path}/no/page.html cannot be written: No such file")


def test_the_page_has_the_whole_run(made):
    (run,) = data_of(made)["runs"]

    assert (run["state"], run["steps"], len(run["samples"])) == ("finished", [*range(STEPS + 1)], 4 * STEPS)
    assert run["metrics"].keys() == data_of(made)["table"].keys()
    assert sum(map(sum, run["distributions"]["reward"]["counts"])) == 4 * STEPS


def test_the_page_loads_nothing(made):
    outside = made.replace("https://github.com/leeoniya/uPlot", "")  # the notice of its license

    assert "http:" not in outside and "https:" not in outside
    assert not re.search(r"<(link|iframe|img|object|embed)\b|\bsrc=|@import|url\(", outside)


def test_the_policy_allows_only_the_scripts_and_styles_of_the_page(made):
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', made)
    parts = dict(part.split(" ", 1) for part in policy.split("; "))

    assert parts["default-src"] == "'none'"
    for kind in ("script", "style"):
        (text,) = re.findall(rf"<{kind}>(.*?)</{kind}>", made, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert parts[f"{kind}-src"] == f"'sha256-{digest}'"
    assert "connect-src" not in parts


def test_text_of_a_run_never_becomes_markup(copy):
    evil = "</script><script>alert(1)</script>"
    write_rows(copy / "samples.jsonl", [{"step": 1, "prompt": evil, "completion": evil, "reward": 1.0}])
    about = json.loads((copy / "run.json").read_text()) | {"name": evil}
    (copy / "run.json").write_text(json.dumps(about))

    html = page([read_run(copy)])

    assert "alert(1)</script>" not in html
    assert data_of(html)["runs"][0]["samples"][0]["completion"] == evil


def test_a_page_with_very_many_samples_stays_small(longer):
    directory = longer(1000, reward__mean=lambda step: step / 1000)
    words = [hashlib.sha256(str(i).encode()).hexdigest() for i in range(500)]
    with (directory / "samples.jsonl").open("w") as file:
        for step in range(1, 1000):
            for i in range(40):
                text = " ".join(words[(step * i + k) % 500] for k in range(20))
                sample = {"step": step, "prompt": text, "completion": text, "reward": i / 40, "prompt_id": i}
                file.write(json.dumps(sample) + "\n")

    html = page([read_run(directory)])
    (run,) = data_of(html)["runs"]

    assert 1_000_000 < len(html) <= MOST_BYTES
    assert any("logged samples, among them the best and worst" in note for note in run["notes"])
    assert len({sample["step"] for sample in run["samples"]}) > 900
    assert {0.0, 39 / 40} <= {sample["reward"] for sample in run["samples"]}


def test_long_texts_are_shortened_in_the_middle(copy):
    write_rows(copy / "samples.jsonl", [{"step": 1, "prompt": "p", "completion": "🧮" * 1_000_000, "reward": None}])

    (run,) = payload([read_run(copy)], most_sample_bytes=10**9)["runs"]

    assert "… 980,000 characters left out …" in run["samples"][0]["completion"]
    assert len(run["samples"][0]["completion"]) < 21_000


def test_a_long_run_keeps_its_evaluations_and_its_last_step(longer, monkeypatch):
    monkeypatch.setattr(payload_module, "MOST_STEPS", 50)
    lines = rows(longer(1000, x=lambda step: step) / "metrics.jsonl")
    for line in lines[::100]:
        line["eval/pass_rate"] = 0.5
    directory = longer(2)
    write_rows(directory / "metrics.jsonl", lines)

    (run,) = payload([read_run(directory)], most_sample_bytes=10**6)["runs"]

    assert 50 <= len(run["steps"]) <= 61
    assert run["steps"][-1] == 999
    assert sum(value is not None for value in run["metrics"]["eval/pass_rate"]) == 10
    assert "the curves show" in run["notes"][-1]


def test_a_metric_without_explanation_is_shown_among_others(copy):
    lines = rows(copy / "metrics.jsonl")
    write_rows(copy / "metrics.jsonl", [line | {"mine/x": 1.0} for line in lines])

    assert payload([read_run(copy)], most_sample_bytes=10**6)["table"]["mine/x"]["group"] == "Other"


def test_the_title_is_escaped():
    assert "<title>a &lt;b&gt;</title>" in document("a <b>", "")
