"""Speed and staleness of the schedules in virtual time, with the window of the trainer."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "benchmarks" / "schedules.py"


@pytest.fixture(scope="module")
def schedules():
    spec = importlib.util.spec_from_file_location("benchmark_schedules", SOURCE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("sigma", "pipelined_split", "least", "least_in_one_pool"), [(1.0, 12, 2.0, 2.4), (0.3, 6, 1.3, 1.3)]
)
def test_async_is_faster_than_sync_and_pipelined_is_in_between(
    schedules, sigma, pipelined_split, least, least_in_one_pool
):
    def outcome(schedule, **settings):
        return schedules.simulate(replace(schedule, **settings), schedules.Lengths(sigma=sigma), num_steps=24)

    sync = outcome(schedules.SYNC)
    pipelined = outcome(schedules.PIPELINED, num_generating=pipelined_split)
    ahead = outcome(schedules.ASYNC, num_generating=6)
    one_pool = outcome(schedules.PARTIAL)

    assert sync.step_s / ahead.step_s >= least
    assert sync.step_s / one_pool.step_s >= least_in_one_pool
    assert sync.step_s > 1.1 * pipelined.step_s > 1.1 * ahead.step_s
    assert set(sync.staleness) == {0}
    assert set(pipelined.staleness) == {1}
    assert ahead.mean_staleness == pytest.approx(1.0, abs=0.05)
    assert max(ahead.staleness) <= 4


def test_steps_ahead_are_the_mean_staleness(schedules):
    schedule = replace(schedules.ASYNC_2, num_generating=6)

    outcome = schedules.simulate(schedule, schedules.Lengths(sigma=1.0), num_steps=24)

    assert outcome.mean_staleness == pytest.approx(2.0, abs=0.05)
    assert outcome.trainer_waits < 0.3


def test_pipelined_takes_as_long_as_its_slower_side(schedules):
    """With equal lengths and no waits, the time of a step follows from the constants."""
    schedule = replace(schedules.PIPELINED, num_generating=8)

    outcome = schedules.simulate(schedule, schedules.Lengths(sigma=0.0), num_steps=12)

    tokens = schedules.PROMPTS * schedules.SAMPLES * 1000
    running = schedules.PROMPTS * schedules.SAMPLES / 8
    generating = 1000 * (schedules.TOKEN_S + schedules.RESPONSE_S * running)
    training = tokens / (8 * schedules.TRAINED_TOKENS_PER_S)
    assert outcome.step_s == pytest.approx(max(generating, training) + schedules.UPDATE_S, rel=1e-6)
    assert outcome.trainer_waits == 0
