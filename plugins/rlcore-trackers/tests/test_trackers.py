"""The real packages write into a local directory, each in a process of its own, without an account or a network."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys

import pytest
from rlcore_trackers.mlflow import MLflowConfig, MLflowTracker
from rlcore_trackers.swanlab import SwanLabConfig, SwanLabTracker
from rlcore_trackers.trackio import TrackioConfig, TrackioTracker

from rlcore.errors import UserError
from rlcore.protocols.tracker import RunInfo
from rlcore.testing.waiting import HANG_S

SCRIPT = """
import sys
from importlib import import_module
from math import nan
from pathlib import Path
import numpy as np
from rlcore.protocols.tracker import RunInfo, SampleRecord

module, name, directory, settings, resume_step = sys.argv[1:]
home = import_module(f"rlcore_trackers.{module}")
tracker_class = getattr(home, name + "Tracker")
run = RunInfo(name="sorting", directory=Path(directory), total_steps=4)
tracker = tracker_class(tracker_class.Config(**eval(settings)), run)
tracker.start({"run.seed": 7, "model.path": "m"}, resume_step=int(resume_step) or None)
for step in (int(resume_step) + 1, int(resume_step) + 2):
    tracker.log(step, {"reward/mean": step / 4, "time_s/weight sync": 0.5, "actor/loss": nan})
    sample = SampleRecord(step=step, prompt="2 + 2 =", completion="4 | ∑", reward=1.0, parts={"exact": 1.0, "other": nan})
    tracker.log_samples(step, [sample])
    tracker.log_distributions(step, {"reward": np.array([0.0, 1.0, 1.0], np.float32), "response_length": np.arange(9)})
    tracker.log_distributions(step, {"reward": np.array([], np.float32)})
tracker.finish({"steps": step, "error": None})
tracker.finish({})
"""


def track(module, name, directory, settings="{}", resume_step=0):
    pytest.importorskip(module, reason=f"needs pip install 'rlcore-trackers[{module}]'")
    home = {"HOME": str(directory), "TRACKIO_DIR": str(directory / "trackio"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, module, name, str(directory), settings, str(resume_step)],
        env={**os.environ, **home, "MLFLOW_ALLOW_FILE_STORE": "true"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_mlflow_has_metrics_settings_tables_and_tags_of_a_resumed_run(tmp_path, monkeypatch):
    settings = {"uri": str(tmp_path / "mlruns"), "experiment": "mine", "tags": {"team": "sort"}}
    track("mlflow", "MLflow", tmp_path, repr(settings))
    track("mlflow", "MLflow", tmp_path, repr(settings), resume_step=2)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    client = MlflowClient(settings["uri"])
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    rewards = [(it.step, it.value) for it in client.get_metric_history(run.info.run_id, "reward/mean")]
    (table,) = tmp_path.glob("mlruns/**/samples/step_000003.json")

    assert sorted(rewards) == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]
    assert run.data.metrics["reward/p90"] == 1.0
    assert run.data.metrics["response_length/p50"] == 4.0
    assert run.data.params == {"run.seed": "7", "model.path": "m"}
    assert run.data.tags["team"] == "sort"
    assert run.data.tags["rlcore.steps"] == "4"
    assert run.info.status == "FINISHED"
    assert json.loads(table.read_text()) == {
        "columns": ["step", "prompt_id", "prompt", "completion", "finish_reason", "reward", "reward/exact", "reward/other"],
        "data": [[3, 0, "2 + 2 =", "4 | ∑", "stop", 1.0, 1.0, None]],
    }  # fmt: skip


def test_swanlab_keeps_a_run_offline(tmp_path):
    track("swanlab", "SwanLab", tmp_path, '{"mode": "offline", "group": "g", "tags": ("a",)}')
    first = (tmp_path / "swanlab_id").read_text()
    track("swanlab", "SwanLab", tmp_path, '{"mode": "offline"}', resume_step=2)
    written = b"".join(path.read_bytes() for path in (tmp_path / "swanlab").rglob("*") if path.is_file())

    assert first
    assert (tmp_path / "swanlab_id").read_text() == first
    for text in ("reward/mean", "distribution/response_length", "4 | ∑", "sorting"):
        assert text.encode() in written or json.dumps(text)[1:-1].encode() in written, text


def test_trackio_keeps_a_run_on_this_machine(tmp_path):
    track("trackio", "Trackio", tmp_path, '{"project": "sort", "group": "g"}')
    track("trackio", "Trackio", tmp_path, '{"project": "sort"}', resume_step=2)
    (file,) = (tmp_path / "trackio").glob("sort*.db")
    rows = sqlite3.connect(file).execute("select step, metrics from metrics where run_name='sorting'").fetchall()
    logged = [(step, json.loads(text)) for step, text in rows]

    assert sorted((step, it["reward/mean"]) for step, it in logged if "reward/mean" in it) == [
        (1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)
    ]  # fmt: skip
    tables = [it["samples"] for _, it in logged if "samples" in it]
    assert len(tables) == 4
    assert len([it for _, it in logged if "distribution/response_length" in it]) == 4


@pytest.mark.parametrize(
    ("module", "tracker", "config"),
    [
        ("mlflow", MLflowTracker, MLflowConfig()),
        ("swanlab", SwanLabTracker, SwanLabConfig()),
        ("trackio", TrackioTracker, TrackioConfig()),
    ],
)
def test_a_missing_package_is_named_with_the_line_to_type(tmp_path, monkeypatch, module, tracker, config):
    monkeypatch.setitem(sys.modules, module, None)

    with pytest.raises(UserError) as raised:
        tracker(config, RunInfo(name="r", directory=tmp_path, total_steps=1))

    assert str(raised.value).splitlines() == [
        f"tracker '{module}' needs the Python package '{module}', which is not installed",
        f"Type  pip install 'rlcore-trackers[{module}]'",
    ]


def test_a_server_that_does_not_answer_is_a_user_error(tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="needs pip install 'rlcore-trackers[mlflow]'")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    run = RunInfo(name="r", directory=tmp_path, total_steps=1)

    with pytest.raises(UserError, match=r"^tracker 'mlflow': "):
        MLflowTracker(MLflowConfig(uri="http://127.0.0.1:9"), run).start({}, resume_step=None)
