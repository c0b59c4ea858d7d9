"""Parts that fail on purpose, named in the settings of runs under test as `faults.py:Name`."""

import os
import signal
from pathlib import Path

from rlcore import hookimpl
from rlcore.backends.local import LocalBackend


class DiesWhileSaving(LocalBackend):
    """Its process is killed when the second checkpoint is half written."""

    def save(self, directory: Path) -> None:
        super().save(directory)
        if len(list(directory.parent.parent.glob("step_*"))) == 1 and not os.environ.get("RLCORE_TEST_RESUMED"):
            os.kill(os.getpid(), signal.SIGKILL)


class DiesInStep(LocalBackend):
    """Its process is killed in the fifth optimiser step."""

    def step(self):
        if self._num_steps == 4 and not os.environ.get("RLCORE_TEST_RESUMED"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step()


class AlwaysNaN(LocalBackend):
    """Its gradient is never finite."""

    def step(self):
        for parameter in self._names:
            parameter.grad.fill_(float("nan"))
        return super().step()


class Raises:
    """A hook that ends the run after its fourth step."""

    @hookimpl
    def rlcore_step_end(self, step):
        if step == 4:
            raise RuntimeError("the fourth step is the last one")


raises = Raises()
