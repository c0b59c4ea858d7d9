"""A signal ends the run even if Python drops its exception, but not while Ray starts."""

import signal
import sys
import time

import pytest

from rlcore.controller.ray_runtime import _signals_kept
from rlcore.testing.waiting import HANG_S
from rlcore.trainer.signals import Signals

ENDS = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: SystemExit}


@pytest.fixture
def signals():
    before = [*map(signal.getsignal, ENDS), sys.unraisablehook]
    made = Signals(lambda: None)
    made.install()
    yield made
    made.restore()
    assert [*map(signal.getsignal, ENDS), sys.unraisablehook] == before


class InFinalizer:
    def __init__(self, number):
        self.number = number

    def __del__(self):
        signal.raise_signal(self.number)


@pytest.mark.parametrize("number", ENDS)
def test_a_signal_dropped_in_a_finalizer_is_sent_again_without_a_traceback(signals, capsys, number):
    with pytest.raises(ENDS[number]):  # noqa: PT012
        InFinalizer(number)
        time.sleep(HANG_S)
    assert signals.asked == number
    assert capsys.readouterr().err == ""


def test_a_second_interrupt_dropped_in_a_finalizer_ends_the_run_at_once(signals):
    signals.in_steps = True
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        InFinalizer(signal.SIGINT)
        time.sleep(HANG_S)


def test_other_exceptions_in_finalizers_are_shown_as_before(signals, monkeypatch):
    shown = []
    monkeypatch.setattr(signals, "_hook_before", shown.append)

    class Broken:
        def __del__(self):
            raise ValueError("broken")

    Broken()
    assert [type(seen.exc_value) for seen in shown] == [ValueError]
    monkeypatch.undo()


@pytest.mark.parametrize(("count", "reached"), [(1, ["one", "up"]), (2, ["one"])])
@pytest.mark.parametrize("number", ENDS)
def test_the_first_signal_waits_until_ray_is_up_and_a_second_one_does_not(signals, number, count, reached):
    seen = []
    handlers = [*map(signal.getsignal, ENDS)]
    with pytest.raises(ENDS[number]), _signals_kept():  # noqa: PT012
        signal.raise_signal(number)
        seen.append("one")
        if count == 2:
            signal.raise_signal(number)
        seen.append("up")
    assert seen == reached
    assert [*map(signal.getsignal, ENDS)] == handlers
