"""Runs with schedule=async in one pool: unfinished responses are set aside while models compute, and continue."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rlcore_tests.runs import metrics, small_run

from rlcore.backends.local import LocalBackend
from rlcore.cli.train import run as train
from rlcore.errors import ConfigError
from rlcore.rollouts.hf import HFRollout
from rlcore.testing.waiting import HANG_S, wait_until
from tests.test_async import ASYNC, asynchronous, check_whole, cluster  # noqa: F401  (a fixture)

ONE_POOL = ("placement=colocated", "eval.every_steps=2")


class Busy(LocalBackend):
    """Backend that says when it trains, and takes its time."""

    trains = False

    def forward_backward(self, *args, **options):
        Busy.trains = True
        time.sleep(0.01)
        result = super().forward_backward(*args, **options)
        Busy.trains = False
        return result


class Quiet(HFRollout):
    """Engine that refuses to generate while a model trains in its process, and is slower than calls between processes."""

    def __init__(self, config, **options):
        super().__init__(config, **options)
        self._model.register_forward_pre_hook(self._check)

    def _check(self, *_):
        assert not Busy.trains
        time.sleep(0.02)


class NeverPauses(HFRollout):
    """An engine that cannot stop in the middle of a response."""

    pause = None


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("device_sharing=always",),
        ("schedule.max_staleness=1",),
        ("schedule.steps_ahead=2", "algorithm=ppo", "algorithm.kl.coefficient=0.1"),
    ],
    ids=lambda more: " ".join(more) or "default",
)
def test_responses_in_one_pool_continue_after_the_update(tmp_path, more):
    first, second = (asynchronous(tmp_path / name, *ONE_POOL, *more) for name in ("first", "second"))

    assert first == second
    assert max(line.get("schedule/set_aside", 0) for line in first[1:]) > 0
    assert max(line["schedule/mixed"] for line in first[1:]) > 0
    assert [line["step"] for line in first if "eval/pass_rate" in line] == [0, 2, 4, 6]
    check_whole(tmp_path / "first")
    limit = 1 if "schedule.max_staleness=1" in more else 4
    assert max(line["schedule/staleness_max"] for line in first[1:]) <= limit


@pytest.mark.parametrize("sharing", ["always", "never"])
def test_on_ray_nothing_is_generated_while_a_model_trains(tmp_path, cluster, sharing):  # noqa: F811
    classes = (f"backend={__name__}:Busy", f"rollout={__name__}:Quiet", f"device_sharing={sharing}")
    asynchronous(tmp_path, *cluster, *ONE_POOL, *classes)

    check_whole(tmp_path)
    assert max(line.get("schedule/set_aside", 0) for line in metrics(tmp_path)[1:]) > 0


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("test_async.py:Undeclared", r"has no in_flight_updates.*Type  schedule=sync"),
        (
            "test_one_pool.py:NeverPauses",
            r"has no pause and resume, .* role 'actor' needs .*Type  placement=split   or  schedule=sync",
        ),
    ],
)
def test_an_engine_that_cannot_set_responses_aside_is_refused(tmp_path, engine, message):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        asynchronous(tmp_path, *ONE_POOL, f"rollout={Path(__file__).parent / engine}")


@pytest.mark.parametrize(
    ("number", "more"), [(signal.SIGKILL, ()), (signal.SIGTERM, ("device_sharing=always",))], ids=["killed", "stopped"]
)
def test_a_resumed_run_loses_no_group(tmp_path, cluster, number, more):  # noqa: F811
    more = (*ONE_POOL, "checkpoint.every_steps=2", *more, *(cluster if number == signal.SIGTERM else ()))
    settings = small_run(tmp_path, *ASYNC, *more, steps=6)
    lines = tmp_path / "r" / "metrics.jsonl"
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "rlcore", "train", *settings]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=variables) as process:
        wait_until(lambda: process.poll() is not None or (lines.exists() and lines.read_text().count("\n") > 3))
        assert process.poll() is None, "the run has ended"
        os.kill(process.pid, number)
        assert process.wait(HANG_S) == (0 if number == signal.SIGTERM else -number)

    train(settings, dry_run=False)

    check_whole(tmp_path)
