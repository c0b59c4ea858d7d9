"""Contract of a tracker."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from rlcore.protocols.tracker import RunInfo, SampleRecord, Tracker
from rlcore.testing.expect import allowed, equal, no_misspelled_member

_CONFIG = {"trainer.steps": 4, "model.path": "/models/m", "eval.data": None, "sampling.stop": ["\n"]}
_SUMMARY = {"steps": 2, "seconds": 1.5, "first_eval": None, "checkpoint": Path("/c")}
_ODD_TEXT = "[bold]{x}[/]\x1b[31m\x00\u202e 🧮\n"


class TrackerContract:
    """Override `make`, and `logged` if the logged values can be read back."""

    def make(self, run: RunInfo) -> Tracker:
        """Return a new tracker, as in a new process."""
        raise NotImplementedError(f"{type(self).__name__} must override make(self, run)")

    def logged(self, tracker: Tracker, run: RunInfo) -> list[tuple[int, str, float | None]] | None:
        """Return (step, metric, value) after `finish`, in order of the steps; None: cannot be read."""
        return None

    @pytest.fixture
    def run(self, tmp_path: Path) -> RunInfo:
        return RunInfo(name="run", directory=tmp_path, total_steps=4)

    def test_no_optional_member_is_misspelled(self, run: RunInfo) -> None:
        no_misspelled_member("tracker", self.make(run))

    def test_metrics_are_logged_unchanged(self, run: RunInfo) -> None:
        steps = {0: {"eval/pass_rate": 0.25}, 1: {"reward/mean": 0.5, "actor/lr": 0.125}, 2: {"reward/mean": 0.75}}
        found = self.write(run, steps)
        for step, metrics in steps.items() if found is not None else []:
            mine = {name: value for at, name, value in found or [] if at == step and name in metrics}
            equal(mine, metrics, f"the metrics of step {step}; names may come and go between steps")

    def test_numbers_that_are_not_finite_do_not_stop_a_run(self, run: RunInfo) -> None:
        with allowed("a tracker must accept metrics that are not finite"):
            found = self.write(run, {1: {"a": math.nan, "b": math.inf, "c": 1.0}})
        assert found is None or (1, "c", 1.0) in found, f"finite metrics of such a step must be kept, got {found}"

    def test_samples_with_any_text_or_no_reward_are_accepted(self, run: RunInfo) -> None:
        columns = {"answer": {"deep": [1, None]}, "object": object()}
        odd = SampleRecord(
            step=1, prompt=_ODD_TEXT, completion=_ODD_TEXT, reward=None, parts={"a": math.nan}, columns=columns
        )
        with allowed("a tracker must accept samples with any text, any columns, and no reward"):
            self.write(run, {1: {"reward/mean": 0.0}}, samples=[odd])

    def test_finish_is_idempotent(self, run: RunInfo) -> None:
        tracker = self.make(run)
        tracker.start(_CONFIG, resume_step=None)
        tracker.finish(_SUMMARY)
        with allowed("finish() may be called again after an error, and must have no effect"):
            tracker.finish(_SUMMARY)

    def test_a_resumed_run_has_every_step_once(self, run: RunInfo) -> None:
        self.write(run, {step: {"x": float(step)} for step in (1, 2, 3)})
        found = self.write(run, {3: {"x": 30.0}, 4: {"x": 40.0}}, resume_step=2)
        wanted = [(1, "x", 1.0), (2, "x", 2.0), (3, "x", 30.0), (4, "x", 40.0)]
        mine = None if found is None else [entry for entry in found if entry[1] == "x"]
        equal(mine or wanted, wanted, "start(resume_step=2) must drop what was logged after step 2, and keep the rest")

    def write(
        self,
        run: RunInfo,
        steps: Mapping[int, Mapping[str, float]],
        *,
        samples: list[SampleRecord] | None = None,
        resume_step: int | None = None,
    ) -> list[tuple[int, str, float | None]] | None:
        """Log a whole run and return the logged values."""
        tracker = self.make(run)
        tracker.start(_CONFIG, resume_step=resume_step)
        for step, metrics in steps.items():
            tracker.log(step, metrics)
            tracker.log_samples(step, samples or [])
        tracker.finish(_SUMMARY)
        return self.logged(tracker, run)
