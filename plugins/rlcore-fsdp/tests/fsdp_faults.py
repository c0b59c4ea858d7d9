"""Backends that fail on purpose, named in the settings of runs under test as `fsdp_faults.py:Name`."""

import os
import signal

from rlcore_fsdp import FSDPBackend


class DiesInStep(FSDPBackend):
    """Rank 1 is killed in the fifth optimiser step."""

    def step(self):
        if self._num_steps == 4 and self.mesh.rank == 1 and not os.environ.get("RLCORE_TEST_RESUMED"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step()


class DiesWhileSaving(FSDPBackend):
    """Rank 1 is killed when the second checkpoint is half written."""

    def save(self, directory):
        earlier = len(list(directory.parent.parent.glob("step_*")))
        if earlier == 1 and self.mesh.rank == 1 and not os.environ.get("RLCORE_TEST_RESUMED"):
            os.kill(os.getpid(), signal.SIGKILL)
        super().save(directory)
